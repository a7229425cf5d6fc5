"""Job files for schedulers. A wrong one is noticed after days in a queue, or repeats a hopeless job for ever."""

from __future__ import annotations

import itertools
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.render import LABELS, ROOT, TARGETS, render
from launch.run import main
from modernbert_train.__main__ import read_run
from modernbert_train.errors import ConfigError
from modernbert_train.plan.gpus import GPUS
from tests.support.tiny_run import TinyRun
from tests.support.waiting import stand_in

FULL = (
    "launch.ranks_per_node=4", "launch.nodes=2", "launch.cpus_per_rank=3", "launch.memory_gib=64", "launch.gpu=h100",
    "launch.sbatch=[--qos=high, --exclusive]", "launch.rdma_resource=rdma/hca_shared_devices_a",
    "launch.time_limit_minutes=90", "launch.save_seconds=60", "launch.partition=long", "launch.account=lab",
    "launch.image=us/mine:1", "launch.volume_claim=disk", "launch.namespace=team", "launch.retries=5",
    "launch.setup=module load cuda", "launch.env.NOTE=it's $HOME \"x\"", "launch.env.NUMBER=1", "compute.device=auto",
    "phases.short.batch_warmup=null", "phases.long.batch_rows=8",
)  # fmt: skip


def rendered(target: str, words: list[str], **more: Any) -> str:
    return render(target, read_run(words), words, **more)


def test_slurm_asks_for_what_the_yaml_says(tiny_run: TinyRun) -> None:
    text = rendered("slurm", tiny_run(*FULL))
    asked = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert asked == [
        "job-name=tiny", "nodes=2", "ntasks-per-node=1", "cpus-per-task=12", "gpus-per-node=h100:4", "mem=64G",
        "time=90", "partition=long", "account=lab", "output=%x-%j.log", "open-mode=append", "requeue",
        "qos=high", "exclusive",
    ]  # fmt: skip
    start = next(line for line in text.splitlines() if line.startswith("srun "))
    words = shlex.split(start)
    assert words.pop(1) == "--wait=600"
    assert words[1:4] == ["--cpus-per-task=12", sys.executable, str(ROOT / "launch/run.py")]
    assert words[4:-2] == tiny_run(*FULL) and words[-2:] == ["--ranks", "4"]


def test_unset_keys_are_not_requested(tiny_run: TinyRun) -> None:
    text = rendered("slurm", tiny_run()).replace(str(ROOT), "")
    assert not any(word in text for word in ("gpu", "--mem", "--time", "--partition", "--account", "None"))


class Job:
    """The rendered script, with stand-ins for srun, which exits with a given code, and scontrol, which logs calls."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder = folder
        self.excluded = "(null)"  # by the job's own --exclude
        self.script = folder / "job.sh"
        self.script.write_text(rendered("slurm", words))

    def start(self, code: int, blamed: str = "") -> tuple[int, list[str]]:
        """Run a start whose launchers exit with a code and blame a machine; return the script's exit code and calls."""
        blame = f'echo {blamed} > "$MODERNBERT_TRAIN_BLAMED"' if blamed else "true"
        shown = f"   ReqNodeList=(null) ExcNodeList={self.excluded}\\n   Features=(null)"
        scontrol = f'[ "$1" = show ] && printf "{shown}\\n" || echo "$@" >> {self.folder}/told'
        stand_in(self.folder, "srun", f"{blame}; exit {code}")
        stand_in(self.folder, "scontrol", scontrol)
        (self.folder / "told").write_text("")
        environment = {"PATH": f"{self.folder}:/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "tiny"}
        done = subprocess.run(["bash", str(self.script)], env=environment, timeout=20)
        return done.returncode, (self.folder / "told").read_text().splitlines()


@pytest.fixture
def slurm_job(tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(tmp_path)
    return Job(tmp_path, tiny_run("launch.retries=2"))


# a run of a month has more faults than launch.retries, which counts consecutive ones
BLAMED = [("node-7.cluster", "node-7"), ("node-3", "node-3,node-7"), ("node-9", None)]


@pytest.mark.runs
@pytest.mark.parametrize(
    "starts",
    [
        *([(code, "", None)] for code in (0, 64, 65, 74, 78)),  # what would only fail again
        [(75, "", "")] * 5,
        *([(code, *blamed) for blamed in BLAMED] for code in (70, 124, 137)),
        [(code, "", "") for code in (124, 124, 75, 124)],  # counted from the last save at a time limit
    ],
    ids=lambda starts: " ".join(str(code) for code, *_ in starts),
)
def test_slurm_starts_again_what_can_end_otherwise(slurm_job: Job, starts: list[tuple[int, str, str | None]]) -> None:
    """Without the machine that is blamed; None: it does not start again."""
    for code, blamed, excluded in starts:
        calls = [] if excluded is None else ["requeue 17"]
        calls += [f"update JobId=17 ExcNodeList={excluded}"] if excluded else []
        assert slurm_job.start(code, blamed) == (0 if calls else code, calls)


@pytest.mark.runs
def test_slurm_still_leaves_out_what_the_job_itself_excludes(slurm_job: Job) -> None:
    slurm_job.excluded = "node[11-12]"
    assert slurm_job.start(124, "node-7")[1] == ["requeue 17", "update JobId=17 ExcNodeList=node-7,node[11-12]"]


def test_kubernetes_starts_again_after_75_and_gives_up_after_a_mistake(tiny_run: TinyRun) -> None:
    service, job = yaml.safe_load_all(rendered("kubernetes", tiny_run(*FULL)))
    spec = job["spec"]
    actions = {
        code: rule["action"] for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }  # fmt: skip
    assert actions == {75: "Ignore", 64: "FailJob", 65: "FailJob", 78: "FailJob"}
    assert (spec["completions"], spec["parallelism"], spec["completionMode"], spec["backoffLimit"]) == (
        2, 2, "Indexed", 10,  # 5 retries, and a fault ends the pods of both machines
    )  # fmt: skip
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": 12, "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": 4, "rdma/hca_shared_devices_a": 1},
    }  # fmt: skip
    assert {"name": "NOTE", "value": 'it\'s $HOME "x"'} in container["env"]
    assert {"name": "NUMBER", "value": "1"} in container["env"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 60)
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"] == "tiny"
    setup, start = container["command"][2].split("\n")
    assert setup == "module load cuda" and start.startswith("exec python /opt/modernbert-train/launch/run.py ")
    assert start.endswith('--ranks 4 --nodes 2 --node-rank "$JOB_COMPLETION_INDEX" --rendezvous tiny-0.tiny:29500')
    assert container["command"][2].count("\n") == 1


def pod_of(tiny_run: TinyRun, *words: str) -> dict[str, Any]:
    _, job = yaml.safe_load_all(rendered("kubernetes", tiny_run(*FULL, *words)))
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize(
    ("gpu", "label"),
    [("h100", "NVIDIA-H100-80GB-HBM3"), ("H200", "NVIDIA-H200"), ("a100", "NVIDIA-A100-SXM4-80GB"),
     ("NVIDIA-A100-PCIE-40GB", "NVIDIA-A100-PCIE-40GB"), ("Tesla-V100-SXM2-32GB", "Tesla-V100-SXM2-32GB")],
)  # fmt: skip
def test_kubernetes_gets_the_label_that_nvidia_gives(tiny_run: TinyRun, gpu: str, label: str) -> None:
    """No node has the label h100, so the job would wait for ever; it must also tolerate the taint of GPU nodes."""
    pod = pod_of(tiny_run, f"launch.gpu={gpu}")
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": label}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_plan_and_kubernetes_call_gpus_the_same() -> None:
    """NVIDIA's only: a job requests nvidia.com/gpu."""
    assert GPUS.keys() - {"mi250x", "mi300x"} <= LABELS.keys()


def test_kubernetes_gives_rdma_devices_and_lets_them_lock_memory(tiny_run: TinyRun) -> None:
    """Without them NCCL silently uses TCP between machines."""
    (container,) = pod_of(tiny_run, "launch.rdma_resource=vpc.amazonaws.com/efa=32")["containers"]
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == 32
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    (plain,) = pod_of(tiny_run, "launch.rdma_resource=null")["containers"]
    assert "securityContext" not in plain and plain["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 4}


def test_a_job_without_gpus_asks_for_no_node_with_them(tiny_run: TinyRun) -> None:
    pod = pod_of(tiny_run, "compute.device=cpu")
    assert "nodeSelector" not in pod and "tolerations" not in pod


def test_slurm_runs_it_in_a_container(tiny_run: TinyRun) -> None:
    """Clusters have Apptainer, not Docker; --nv passes the GPUs, and /dev/infiniband is visible anyway."""
    words = tiny_run(*FULL, "launch.container=/images/my own.sif")
    start = next(line for line in rendered("slurm", words).splitlines() if line.startswith("srun "))
    assert shlex.split(start) == [
        "srun", "--wait=600", "--cpus-per-task=12", "apptainer", "exec", "--nv", "--bind", "$PWD", "--pwd", "$PWD",
        "/images/my own.sif", "python", "/opt/modernbert-train/launch/run.py", *words, "--ranks", "4",
    ]  # fmt: skip
    assert "--nv" not in rendered("slurm", tiny_run(*FULL, "launch.container=a.sif", "compute.device=cpu"))


@pytest.mark.parametrize(
    ("name", "label"), [("My_run.2", "my-run-2"), ("2", "run-2"), ("on", "on"), ("a" * 90, "a" * 50)]
)
def test_kubernetes_gets_a_name_it_takes(tiny_run: TinyRun, name: str, label: str) -> None:
    for part in yaml.safe_load_all(rendered("kubernetes", tiny_run(*FULL, f"name='{name}'"))):
        assert part["metadata"] == {"name": label, "namespace": "team"}


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_kubernetes_own_schema_takes_it(tiny_run: TinyRun, device: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for part in yaml.safe_load_all(rendered("kubernetes", tiny_run(*FULL, f"compute.device={device}"))):
        for version in ("1.29", "1.31", "1.33"):
            validate.validate(part, version, strict=True)


def test_skypilot_resumes_after_75(tiny_run: TinyRun) -> None:
    task = yaml.safe_load(rendered("skypilot", tiny_run(*FULL)))
    assert task["resources"] == {
        "accelerators": "h100:4", "cpus": "12+", "memory": "64+", "image_id": "docker:us/mine:1",
        "job_recovery": {"max_restarts_on_errors": 5, "recover_on_exit_codes": [75]},
    }  # fmt: skip
    assert (task["num_nodes"], task["envs"]["NOTE"]) == (2, 'it\'s $HOME "x"')
    last = task["run"].splitlines()[-1]
    assert last.startswith("exec python launch/run.py ") and '--node-rank "$SKYPILOT_NODE_RANK" --rendezvous' in last


def test_skypilot_itself_takes_it(tiny_run: TinyRun, tmp_path: Path) -> None:
    sky = pytest.importorskip("sky", reason="pip install skypilot")
    file = tmp_path / "task.yaml"
    file.write_text(rendered("skypilot", tiny_run(*FULL)))
    assert sky.Task.from_yaml(str(file)).num_nodes == 2


@pytest.mark.runs
def test_docker_runs_it_once_with_what_it_needs(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The rendered script, with a stand-in for docker that records its arguments."""
    stand_in(tmp_path, "docker", f'printf "%s\\n" "$@" > {tmp_path}/called\nexit 75')
    file = tmp_path / "job.sh"
    file.write_text(rendered("docker", tiny_run(*FULL), nodes=1))
    done = subprocess.run(["sh", str(file)], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, cwd=tmp_path, timeout=20)
    called = (tmp_path / "called").read_text().split("\n")
    assert done.returncode == 75 and called[:2] == ["run", "--rm"]
    options = {"--gpus all", "--stop-timeout 60", f"--volume {tmp_path}:/work", "--ulimit memlock=-1"}
    assert options <= {" ".join(pair) for pair in itertools.pairwise(called)}
    assert 'NOTE=it\'s $HOME "x"' in called and "us/mine:1" in called


@pytest.mark.parametrize(
    ("target", "words", "message"),
    [
        ("slurm", ("compute.device=auto",), r"launch\.ranks_per_node is not set"),
        ("slurm", ("launch.nodes=3",), "cannot be divided evenly among 3 ranks"),
        ("kubernetes", (), r"launch\.image is not set"),
        ("kubernetes", ("launch.image=x",), r"launch\.volume_claim is not set"),
        ("kubernetes", (*FULL, "launch.gpu=h1000"), "launch.gpu=h1000: on Kubernetes one of .*h100.*kubectl get nodes"),
        ("skypilot", ("compute.device=auto", "launch.ranks_per_node=1"), r"launch\.gpu is not set"),
        ("docker", (), r"launch\.image is not set"),
        ("docker", ("launch.image=x", "launch.nodes=2"), r"launch\.nodes=2 with --on docker"),
        (
            "slurm",
            ("launch.sbatch=['--qos=a\\n#SBATCH --wrap=b', qos=high]",),
            "not an option of sbatch. Write it as",
        ),
        ("slurm", ("launch.sbatch=[qos=high]",), "'qos=high' is not an option of sbatch"),
        ("slurm", ("launch.sbatch=[1]",), "expected a list of texts"),
        ("slurm", ("launch.rdma_resource=ib",), "DOMAIN/NAME or DOMAIN/NAME=COUNT is expected"),
        ("slurm", ("launch.rdma_resource=rdma/ib=0",), "DOMAIN/NAME or DOMAIN/NAME=COUNT is expected"),
    ],
)
def test_what_a_scheduler_would_stumble_over_is_reported_before(
    tiny_run: TinyRun, target: str, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rendered(target, tiny_run(*words))


@pytest.mark.runs
def test_the_command_writes_and_submits(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tiny_run()
    assert main([*words, "--on", "slurm"]) == 0
    shown = capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*words, "--on", "slurm", "--submit"]) == 78  # no sbatch here: the file is written, the command printed
    assert "there is no sbatch here" in capsys.readouterr().err
    stand_in(tmp_path, "sbatch", f'echo "$@" > {tmp_path}/submitted')
    assert main([*words, "--on", "slurm", "--out", "my.sh", "--submit"]) == 0
    assert (tmp_path / "submitted").read_text() == "my.sh\n"
    assert "#SBATCH --job-name=tiny" in shown and (tmp_path / "my.sh").exists()


@pytest.mark.runs
@pytest.mark.parametrize("target", TARGETS)
def test_shells_can_read_what_they_are_given(tiny_run: TinyRun, target: str) -> None:
    text = rendered(target, tiny_run(*FULL), nodes=1)
    if target == "skypilot":
        task = yaml.safe_load(text)
        text = task["setup"] + task["run"]
    if target == "kubernetes":
        text = pod_of(tiny_run)["containers"][0]["command"][2]
    assert subprocess.run([shutil.which("bash") or "sh", "-n"], input=text, text=True, timeout=20).returncode == 0
