"""Reading commands of others: what is understood, what is assumed aloud, and what is refused or named."""

from __future__ import annotations

from pathlib import Path

import pytest
from emit_builders import agg, disagg, plan

from aiconfig.emit.files import emit, write
from aiconfig.emit.reading import Stated, import_files, import_line
from policies.errors import ConfigError
from twin.perf.layout import Layout

HERE = Stated(gpu="h100_sxm")


def test_a_line_of_vllm_with_everything_that_people_write() -> None:
    read = import_line(
        "CUDA_VISIBLE_DEVICES=0,1 /opt/bin/vllm serve Qwen/Qwen3-30B-A3B -tp 2 --data_parallel_size=4 \\\n"
        "  --enable-expert-parallel --max-num-seqs=128 --max-num-batched-tokens 4096 --no-enable-prefix-caching \\\n"
        "  --kv-cache-dtype fp8_e4m3 --port 8080 --served-model-name a b --trust-remote-code > log.txt 2>&1 &",
        HERE,
    )
    (pool,) = read.candidate.pools
    assert read.candidate.model == "qwen3-30b-a3b"
    assert pool.layout == Layout(tp=2, dp=4, ep=8)
    assert (pool.max_num_seqs, pool.max_num_batched_tokens, pool.kv, pool.weights) == (128, 4096, "fp8", "bf16")
    assert read.aside == ("--port", "--served-model-name", "--trust-remote-code")
    assert read.unknown == ()


def test_what_the_table_does_not_know_is_named_with_what_was_near() -> None:
    read = import_line("vllm serve m --tensor-paralel-size 2 --frobnicate 3 --swap-space=4 extra", HERE)
    assert read.unknown == (
        "--tensor-paralel-size (did you mean --tensor-parallel-size?)", "--frobnicate", "--swap-space", "extra"
    )  # fmt: skip
    assert read.candidate.pools[0].layout == Layout()


def test_what_a_command_leaves_open_is_assumed_aloud() -> None:
    read = import_line("vllm serve /models/mine", HERE)
    assert read.candidate.model == "/models/mine"
    assert read.notices == (
        "--max-num-seqs is not given: taken as 256, our default",
        "--max-num-batched-tokens is not given: taken as 8192, our default",
        "the format of the weights is not in the command: taken as bf16 (--weights)",
        "how many workers there are is not in the command: taken as 1 (--replicas)",
    )


def test_sglang_counts_ranks_and_requests_together() -> None:
    read = import_line(
        "python -m sglang.launch_server --model deepseek-ai/DeepSeek-V3 --tp 8 --attn-dp-size 4 --ep 8 "
        "--max-running-requests 256 --chunked-prefill-size 32768",
        HERE,
    )
    (pool,) = read.candidate.pools
    assert pool.layout == Layout(tp=2, dp=4, ep=8)
    assert (pool.max_num_seqs, pool.max_num_batched_tokens, pool.weights) == (64, 8192, "fp8")


@pytest.mark.parametrize("version", ["0.5.2", "0.5.23"])
def test_the_older_way_to_say_attention_dp_is_read_in_every_release(version: str) -> None:
    line = "python3 -m sglang.launch_server --model-path m --tp-size 8 --dp-size 8 --enable-dp-attention"
    read = import_line(line, Stated(gpu="h100_sxm", version=version))
    assert read.candidate.pools[0].layout == Layout(tp=1, dp=8)


def test_trtllm_with_its_file_of_options(tmp_path: Path) -> None:
    options = tmp_path / "extra.yml"
    options.write_text("enable_attention_dp: true\nkv_cache_config:\n  dtype: fp8\nprint_iter_log: true\n")
    line = f"trtllm-serve serve deepseek-ai/DeepSeek-R1 --tp_size 8 --ep_size 8 --config {options} --max_batch_size 32"
    read = import_line(line, HERE)
    (pool,) = read.candidate.pools
    assert (pool.layout, pool.kv, pool.max_num_seqs) == (Layout(tp=1, dp=8, ep=8), "fp8", 32)
    assert read.unknown == ("print_iter_log",)


def test_a_release_beyond_the_table_is_said() -> None:
    read = import_line("vllm serve m", Stated(gpu="h100_sxm", version="1.0"))
    assert read.notices[0].startswith("vllm 1.0 is not covered by the table of flags (0.9.2 to 0.32.0)")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("echo hello", "no vllm serve, sglang.launch_server or trtllm-serve in it"),
        ("vllm serve", "no model in the command"),
        ("vllm serve m -tp two", r"--tensor-parallel-size 'two' is not a whole number"),
        ("vllm serve m -tp 0", r"--tensor-parallel-size 0: at least 1"),
        ("vllm serve m -tp", r"-tp has no value"),
        ("vllm serve m --enable-expert-parallel=yes", r"--enable-expert-parallel takes no value, and has 'yes'"),
        ("vllm serve m --kv-cache-dtype int3", r"--kv-cache-dtype 'int3' has no counterpart here \(known: bfloat16"),
        ("vllm serve m --speculative-config '{'", r"is not a JSON object"),
        ("vllm serve 'm", "no closing quotation in the command"),
        ("python -m sglang.launch_server --model m --tp 8 --dp-size 2", "2 workers of their own behind one address"),
        ("python -m sglang.launch_server --model m --tp 4 --attn-dp-size 3", "do not divide --tp-size 4"),
        ("trtllm-serve m --config /no/such/file", "the file of options /no/such/file: No such file"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused_in_one_line(line: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        import_line(line, HERE)
    assert "\n" not in str(caught.value)


def test_a_command_without_gpus_asks_for_them() -> None:
    with pytest.raises(ConfigError, match="a command does not say its GPUs; give --gpu"):
        import_line("vllm serve m")
    with pytest.raises(ConfigError, match="did you mean 'h100_sxm'"):
        import_line("vllm serve m", Stated(gpu="h100_smx"))


def test_a_folder_of_ours_is_read_whole(tmp_path: Path) -> None:
    made = plan(disagg("trtllm"))
    write(emit(made, "trtllm"), tmp_path)
    assert import_files([tmp_path]).candidate == made.candidate
    assert (tmp_path / "launch" / "prefill.sh").stat().st_mode & 0o111


def test_what_is_said_beside_a_file_of_ours_wins_over_it(tmp_path: Path) -> None:
    write(emit(plan(agg()), "vllm"), tmp_path)
    read = import_files([tmp_path / "launch" / "mixed.sh"], Stated(gpu="b200_sxm", replicas=7))
    assert (read.candidate.pools[0].gpu, read.candidate.pools[0].replicas) == ("b200_sxm", 7)


def test_a_flag_that_somebody_added_to_a_file_of_ours_counts(tmp_path: Path) -> None:
    write(emit(plan(agg()), "vllm"), tmp_path)
    script = tmp_path / "launch" / "mixed.sh"
    script.write_text(script.read_text().replace("\n)\n", "\n  --max-num-seqs 7  # mine\n  --nonsense\n)\n"))
    read = import_files([script])
    assert read.candidate.pools[0].max_num_seqs == 7
    assert read.unknown == ("--nonsense",)


def test_a_role_that_contradicts_the_flags_is_refused() -> None:
    line = "python -m sglang.launch_server --model m --disaggregation-mode decode"
    with pytest.raises(ConfigError, match="its flags are those of a decode worker, not of a prefill one"):
        import_line(line, Stated(gpu="h100_sxm", role="prefill"))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    binary = tmp_path / "x.sh"
    binary.write_bytes(b"\xff\xfe")
    for path, text in ((tmp_path / "none.sh", "No such file"), (binary, "no text"), (tmp_path / "empty", "no scripts")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=text):
            import_files([path])
