"""Documents that describe the command line are made from it, and the commands that the README shows do run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from short_trace import cut_bundled_trace

from reports.picture import described
from reports.report import Report

FENCE = re.compile(r"```(?:bash|sh|console)\n(.*?)```", re.DOTALL)


def shown_commands(document: Path) -> list[str]:
    """The lines of a document's shell blocks, without prompts, comments and continuation marks."""
    blocks = "\n".join(FENCE.findall(document.read_text(encoding="utf-8"))).replace("\\\n", " ")
    lines = (line.strip().removeprefix("$ ").split("  #")[0].strip() for line in blocks.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def test_the_reference_documents_are_up_to_date(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, root / "docs" / "reference.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_document_is_in_the_index(root: Path) -> None:
    index = (root / "docs" / "README.md").read_text(encoding="utf-8")
    docs = root / "docs"
    paths = [*docs.glob("*.md"), *(docs / "results").glob("*.md")]
    documents = {str(path.relative_to(docs)) for path in paths} - {"README.md"}
    assert any(name.startswith("results/") for name in documents)
    assert {name for name in documents if f"]({name})" not in index} == set()


def test_links_between_documents_lead_somewhere(root: Path) -> None:
    folders = (root, root / "docs", root / "docs" / "results")
    documents = [*(path for folder in folders for path in folder.glob("*.md")), root / "traces" / "README.md"]
    links = [
        (document, link)
        for document in documents
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8"))
        if "://" not in link
    ]
    assert len(links) > 10
    assert [f"{document.name}: {link}" for document, link in links if not (document.parent / link).exists()] == []


def test_tests_that_documents_name_are_there(root: Path) -> None:
    named = [
        (document.name, name)
        for document in (root / "docs").glob("*.md")
        for name in re.findall(r"tests/[\w/]+\.py", document.read_text(encoding="utf-8"))
    ]
    assert len(named) > 60
    assert [f"{document}: {name}" for document, name in named if not (root / name).is_file()] == []


def test_make_knows_every_target_that_is_shown(root: Path) -> None:
    targets = {shlex.split(line)[1] for name in ("README.md", "CONTRIBUTING.md") for line in shown_commands(root / name)
               if line.startswith("make ")}  # fmt: skip
    assert {"replay", "test"} <= targets
    for target in targets:
        done = subprocess.run(["make", "-n", target], cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def made_model(folder: Path) -> None:
    """A folder with a tokenizer, which is all that a plan asks of a checkpoint."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")


def serves(line: str, folder: Path, env: dict[str, str]) -> None:
    """The command comes up, says that it is ready, and ends as it should when it is interrupted."""
    command = [*shlex.split(line, comments=True), "--port", "0", "--grace", "0", "--quiet"]
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert any('"ready"' in told for told in process.stdout), process.communicate()[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.slow
def test_the_commands_of_the_readme_run(root: Path, tmp_path: Path) -> None:
    cut_bundled_trace(root, tmp_path)
    (tmp_path / "docs").symlink_to(root / "docs")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    lines = [line for line in shown_commands(root / "README.md") if not line.startswith(("make ", ". "))]
    assert sum(line.startswith("twin ") for line in lines) >= 5
    env = {**os.environ, "PATH": path, "DYNATWIN_VLLM_PYTHON": sys.executable}
    made_model(tmp_path / "llama")
    for shown in lines:
        line = shown.replace("/models/llama", str(tmp_path / "llama"))
        if line.startswith("twin serve") and "--plan" not in line:
            serves(line, tmp_path, env)
            continue
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in ((0, 3) if "--sla" in line else (0,)), f"{line}\n{done.stderr}"
        says = ("twin import", "twin serve")  # what they changed or left out
        assert done.stderr == "" or line.startswith(says), f"{line}\n{done.stderr}"


@pytest.mark.slow
def test_the_blocks_of_the_notebook_document_run_one_after_the_other(root: Path, tmp_path: Path) -> None:
    cut_bundled_trace(root, tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    text = (root / "docs" / "notebooks.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL)
    assert [language for language, _ in blocks] == ["bash", "python", "bash"]
    for language, block in blocks:
        command = ["bash", "-euc", block] if language == "bash" else [sys.executable, "-c", block]
        env = {**os.environ, "PATH": path}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block}\n{done.stderr}"
    assert (tmp_path / "first.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_output_and_the_picture_that_the_readme_shows_are_what_comes_out(root: Path, tmp_path: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    ((line, output),) = re.findall(r"<!-- printed by: twin (.*?) -->\n```text\n(.*?)```", text, re.DOTALL)
    command = [sys.executable, "-m", "twin.cli", *shlex.split(line), "--no-html", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert output in done.stdout
    with Image.open(root / "docs" / "report.png") as image:
        assert image.info["Description"] == described(Report.load(tmp_path / "run"))
