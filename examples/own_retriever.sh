#!/usr/bin/env bash
# A retriever of your own, from documents to a table:
#
#   examples/own_retriever.sh OUT HOURS SUITE.yaml DOCUMENTS.jsonl...
#
# 1. An uncased tokenizer is trained on the documents, and an encoder is pretrained on them for HOURS (masked-language
#    modelling).
# 2. It is trained with three seeds on pairs taken from them (headings and sections, docstrings and functions), and so is
#    its twin without pretraining, with one.
# 3. All are measured on the suite beside the models named in BESIDE (bm25 alone, unless you set it).
#
# Each line of DOCUMENTS has `text` and `path`; .zst and .gz are read too. The same command continues after a kill.
# A suite of two sets in BEIR's layout and a task of labelled texts:
#
#   seeds: [17, 18, 19]
#   tasks:
#     search: {beir: my/search}
#     code: {beir: my/code}
#     intents: {finetune: my/intents.yaml}
#
# The tables are OUT/table/table.md, .csv and .tex. Other keys of the training on pairs, such as "batch_size=64 epochs=2",
# go into PAIRS, and the size of the vocabulary into ENTRIES (8192). With MINER=MODEL, such as all-MiniLM-L6-v2, a pair
# has a hard negative: of the thirty texts that are nearest by that model, the nearest with a score at least a twentieth
# below the positive's, if there is one (forty minutes of a CPU core for 56,000 pairs).
set -euo pipefail
out=$1 hours=$2 suite=$3
shift 3
here=$(cd "$(dirname "$0")/.." && pwd)
run=(python -m modernbert_train)
read -ra keys <<< "${PAIRS:-}"
read -ra beside <<< "${BESIDE:-bm25}"

"${run[@]}" eval "${beside[@]}" --suite "$suite" --out "$out/table" --dry-run # a mistake in it ends the script here
if [ ! -d "$out/tokenizer" ]; then
    "${run[@]}" tokenizer train "$out/tokenizer" "$@" --kind jsonl --text-field text --entries "${ENTRIES:-8192}" \
        --spare 0 --uncased
fi
"${run[@]}" pretrain "$@" --tokenizer "$out/tokenizer" --hours "$hours" --out "$out/pretrained" --name encoder --yes
if [ ! -f "$out/pairs.jsonl" ]; then
    python "$here/examples/text_pairs.py" "$out/pairs.partial" "$@"
    mv "$out/pairs.partial" "$out/pairs.jsonl" # so that a killed command leaves no half of them
fi
pairs=$out/pairs.jsonl
if [ -n "${MINER:-}" ]; then
    pairs=$out/mined.jsonl
    "${run[@]}" retrieval mine "$out/pairs.jsonl" --model "$MINER" "out=$pairs" num_negatives=1 max_tokens=96 \
        relative_margin=0.05 range_max=30
    keys+=("negative_columns=[negatives]")
fi

models=()
train() { # NAME MODEL SEED
    "${run[@]}" retrieval train "$here/yamls/retrieval/own.yaml" --model "$2" "train=[$pairs]" \
        "runs_folder=$out/runs" "name=$1" "seed=$3" "${keys[@]}"
    models+=("$out/runs/$1/st")
}
for seed in 17 18 19; do
    train "own-$seed" "$out/pretrained/runs/encoder" "$seed"
done
train twin-17 "untrained:$out/pretrained/runs/encoder" 17

"${run[@]}" eval "${models[@]}" "${beside[@]}" --suite "$suite" --out "$out/table"
