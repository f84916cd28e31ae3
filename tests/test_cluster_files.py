"""Cluster scripts and manifests: what they start, and that their numbers agree."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxablate.results import parse_shard

FILES = Path(__file__).resolve().parents[1] / "docs" / "cluster"
SCRIPTS = sorted(FILES.glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_starts_the_experiment_it_is_given(script, tmp_path):
    stub = tmp_path / ".venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text('#!/bin/sh\nfor a in "$@"; do echo "$a"; done\n')
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    for path in (stub, srun):
        path.chmod(0o755)
    environment = {"PATH": f"{srun.parent}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    given = ["experiments/influence.py", "--out=a directory"]
    done = subprocess.run(
        ["bash", script, *given], env=environment, capture_output=True, text=True, check=True
    )
    started = done.stdout.splitlines()
    assert started[:2] == given
    assert ("--shard=auto" in started) != ("--distributed" in started)
    nothing = subprocess.run(["bash", script], env=environment, capture_output=True, check=False)
    assert nothing.returncode == 2


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", script], check=True)


def test_an_indexed_job_has_as_many_shares_as_pods():
    job = yaml.safe_load((FILES / "indexed_job.yaml").read_text())["spec"]
    environment = _environment(job)
    pods = job["completions"]
    shares = {
        parse_shard("auto", environment | {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(pods)
    }
    assert len(shares) == pods == next(iter(shares)).count
    assert job["completionMode"] == "Indexed"


def test_a_jobset_names_its_first_pod_as_the_coordinator():
    jobset = yaml.safe_load((FILES / "jobset.yaml").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    environment = _environment(job)
    assert environment["JOB_COMPLETIONS"] == str(job["completions"]) == str(job["parallelism"])
    name = environment["JAX_COORDINATOR_ADDRESS"].replace("$(JOBSET_NAME)", "set")
    assert name == f"set-{replicated['name']}-0-0.set:8476"
    assert job["template"]["spec"]["containers"][0]["ports"] == [{"containerPort": 8476}]


def _environment(job: dict) -> dict[str, str]:
    (container,) = job["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}
