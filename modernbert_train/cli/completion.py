"""Shell completion: a script made from the table of verbs, their parsers and the configuration's keys.

The script is complete in itself, so that pressing Tab starts no Python. It knows verbs, options and their choices,
every key with the values of closed choices, names of phases and evals in the YAML files on the line, tasks, YAML files
and folders. A list in the script is a line of `_modernbert_train_list`, by a name such as `options check`.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

from modernbert_train.cli.before import STARTING_POINTS, starting_points
from modernbert_train.cli.parser import Parser
from modernbert_train.cli.verbs import VERBS, make_parser
from modernbert_train.config.tools.reference import ROOTS, keys_of
from modernbert_train.installed import YAMLS

SHELLS = ("bash", "zsh")


def script(shell: str) -> str:
    """The script of a shell, to be evaluated when it starts.

    Args:
        shell: one of SHELLS.
    """
    cases = "\n".join(
        f"  {shlex.quote(name)}) printf '%s\\n' {shlex.join(words)} ;;" for name, words in _lists() if words
    )
    return _HEAD.replace("CASES", cases) + {"bash": _BASH, "zsh": _ZSH}[shell]


def _lists() -> Iterator[tuple[str, list[str]]]:
    """The name of each list of the script, and its words."""
    yield "verbs", [*(verb.name for verb in VERBS), "help"]
    yield "words help", [verb.name for verb in VERBS]
    for verb in VERBS:
        yield from _of_parser(verb.name, make_parser(verb))
        if verb.keys:
            yield f"roots {verb.name}", [*verb.keys]
    for kind in STARTING_POINTS:
        yield f"words init {kind}", [*starting_points(kind)]
    yield "words finetune", sorted(path.stem for path in (YAMLS / "tasks").glob("*.yaml"))
    for root in dict.fromkeys(root for verb in VERBS for root in verb.keys):
        keys = keys_of(ROOTS[root][1])
        yield f"keys {root}", [f"{key}=" for key in keys]
        for key, values in keys.items():
            if values:
                yield f"values {root} {key}", [*values]


def _of_parser(path: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Options, their choices, and what stands in the first place, of a verb and of the verbs below it."""
    yield (
        f"options {path}",
        [max(action.option_strings, key=len) for action in parser._actions if action.option_strings],
    )
    if isinstance(parser, Parser) and parser.implied is not None:
        yield f"implied {path}", [parser.implied]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield f"words {path}", [*action.choices]
            for name, below in action.choices.items():
                yield from _of_parser(f"{path} {name}", below)
        elif action.option_strings and action.nargs != 0:
            for option in action.option_strings:
                files = ["FILES"] if action.type in (None, Path) else []
                yield f"choices {path} {option}", [*map(str, action.choices or files)]
        elif action.choices:
            yield f"words {path}", [*map(str, action.choices)]


# Written for sh, as which zsh emulates it; both shells' functions below ask it for candidates.
_HEAD = r"""# modernbert-train completion: made by `modernbert-train completion`, and made anew after an update

_modernbert_train_list() {
  case "$1" in
CASES
  *) return 1 ;;
  esac
}

# of a section such as phases in the YAML files on the line: the names in it; without any, the recipes' phases
_modernbert_train_names() {
  local section=$1 file found=
  shift
  for file in "$@"; do
    [ -d "$file" ] && file=$file/config.yaml
    case "$file" in *.yaml|*.yml) [ -f "$file" ] && found="$found
$(awk -v section="$section" '
      { indent = match($0, /[^ ]/) - 1 }
      /^ *(#|$)/ { next }
      on && indent <= outer { on = 0 }
      on && (inner < 0 || indent == inner) && match($0, /^ *[A-Za-z0-9_-]+:/) {
        inner = indent; name = substr($0, 1, RLENGTH - 1); sub(/^ */, "", name); print name }
      $0 ~ "^ *" section ": *(#.*)?$" { on = 1; outer = indent; inner = -1 }' "$file")" ;;
    esac
  done
  [ -z "$found" ] && [ "$section" = phases ] && found="stable context decay"
  printf '%s\n' $found
}

# candidates, one a line, for the word $1 after the words $2...; those that end in = or / are not complete
_modernbert_train_candidates() {
  [ -n "$ZSH_VERSION" ] && emulate -L sh
  local cur=$1 word last= verb= place= key value root name file tail
  shift
  if [ $# -eq 0 ]; then
    case "$cur" in -*) printf '%s\n' --help --version ;; *) _modernbert_train_list verbs ;; esac
    return
  fi
  verb=$1 place=$1
  [ $# -gt 1 ] && _modernbert_train_list "options $1 $2" > /dev/null && place="$1 $2"
  for word in "$@"; do case "$word" in -*) last=$word ;; esac; done
  for word in "$@"; do :; done
  case "$cur" in
  -*=*) return ;;
  -*) _modernbert_train_list "options $place"; return ;;
  *=*)
    key=${cur%%=*} value=${cur#*=}
    for root in $(_modernbert_train_list "roots $verb"); do
      for name in "$key" "${key%%.*}.<name>.${key#*.*.}"; do
        if _modernbert_train_list "values $root $name" > /dev/null; then
          for word in $(_modernbert_train_list "values $root $name"); do printf '%s\n' "$key=$word"; done
          return
        fi
      done
    done
    for file in "$value"*; do
      if [ -d "$file" ]; then printf '%s\n' "$key=$file/"; elif [ -e "$file" ]; then printf '%s\n' "$key=$file"; fi
    done
    return ;;
  esac
  if [ -n "$last" ] && [ "$last" = "$word" ]; then  # the value of an option, or what follows a flag
    tail=$(_modernbert_train_list "choices $place $last")
    if [ "$tail" = FILES ]; then
      for file in "$cur"*; do
        if [ -d "$file" ]; then printf '%s\n' "$file/"; elif [ -e "$file" ]; then printf '%s\n' "$file"; fi
      done
      return
    elif [ -n "$tail" ]; then
      printf '%s\n' "$tail"
      return
    fi
  fi
  if [ "$verb" = finetune ]; then  # a task may stand anywhere
    _modernbert_train_list "words $verb"
  elif [ $# -eq 1 ] && _modernbert_train_list "words $verb"; then
    _modernbert_train_list "implied $verb" > /dev/null || return
  elif [ $# -eq 2 ] && _modernbert_train_list "words $verb $2"; then
    return
  fi
  for root in $(_modernbert_train_list "roots $verb"); do
    for key in $(_modernbert_train_list "keys $root"); do
      case "$key" in
      *'<name>'*)
        tail=${key%%.<name>*}
        case "$cur" in "$tail".*|"$tail")
          for name in $(_modernbert_train_names "${tail##*.}" "$@"); do
            printf '%s\n' "$tail.$name${key#*<name>}"
          done ;;
        *) printf '%s\n' "$tail." ;;
        esac ;;
      *) printf '%s\n' "$key" ;;
      esac
    done
  done
  for file in "$cur"*; do
    case "$file" in
    *.yaml|*.yml) [ -f "$file" ] && printf '%s\n' "$file" ;;
    *) [ -d "$file" ] && printf '%s\n' "$file/" ;;
    esac
  done
}
"""

_BASH = r"""
_modernbert_train_bash() {
  local line=${COMP_LINE:0:COMP_POINT} cur= word before
  local -a words
  read -r -a words <<< "$line"
  if [[ $line != *[[:space:]] ]]; then cur=${words[-1]}; unset 'words[-1]'; fi
  before=${cur%"${cur##*=}"}  # bash takes what follows a = for a word of its own
  [[ $COMP_WORDBREAKS == *=* ]] || before=
  COMPREPLY=()
  while IFS= read -r word; do
    [[ $word == "$cur"* ]] || continue
    [[ $word == *[=/.] ]] || word="$word "
    COMPREPLY+=("${word#"$before"}")
  done < <(_modernbert_train_candidates "$cur" "${words[@]:1}" | sort -u)
}
complete -o nospace -F _modernbert_train_bash modernbert-train
"""

_ZSH = r"""
_modernbert_train_zsh() {
  local -a found open closed
  found=(${(fu)"$(_modernbert_train_candidates "${words[CURRENT]}" "${(@)words[2,CURRENT-1]}" 2> /dev/null)"})
  open=(${(M)found:#*[=/.]}) closed=(${found:#*[=/.]})
  (( $#open )) && compadd -S '' -a open
  (( $#closed )) && compadd -a closed
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _modernbert_train_zsh modernbert-train
"""
