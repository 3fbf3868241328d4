"""What block managers did, in lines for a person."""

from __future__ import annotations

from reports.kv_tiers import tier_lines

EDGE = {"stored_bytes": 2_000_000, "batches": 3, "loaded_bytes": 1_000, "evicted": 4, "failed_reads": 0, "dropped": 0}


def test_where_prompts_were_found_what_moved_and_what_went_wrong() -> None:
    hits = {"lookups": 1000, "g1": 250, "g2": 0, "g3": 50, "miss_absent": 695, "miss_failed": 5}
    edges = {"g3": EDGE | {"failed_reads": 5, "dropped": 1}}
    assert list(tier_lines({"hits": hits, "edges": edges, "spreads": {}})) == [
        "found 25.0 % in device, 5.0 % in disk of 1,000 blocks (first admissions)",
        "computed: 69.5 % nobody had, 0.5 % read in vain",
        "disk: 2 MB down in 3 transfers, 1 kB up, 4 blocks evicted; 5 failed reads, 1 dropped",
    ]


def test_a_run_without_tiers_says_nothing_and_one_that_found_nothing_says_so() -> None:
    assert list(tier_lines({})) == []
    assert list(tier_lines({"hits": {"lookups": 0}, "edges": {"g2": EDGE}})) == [
        "found nothing of 0 blocks (first admissions)",
        "host memory: 2 MB down in 3 transfers, 1 kB up, 4 blocks evicted",
    ]


def test_what_was_read_of_other_workers_stands_in_a_line_of_its_own() -> None:
    kvbm = {
        "hits": {"lookups": 10, "g2": 3},
        "edges": {},
        "peers": {"loaded": 3, "failed_reads": 0, "loaded_bytes": 6000},
    }
    assert list(tier_lines(kvbm))[-1] == "other workers: 6 kB up in 3 blocks"
    kvbm["peers"] = {"loaded": 1, "failed_reads": 2, "loaded_bytes": 1000}
    assert list(tier_lines(kvbm))[-1] == "other workers: 1 kB up in 1 block; 2 failed reads"


def test_how_often_the_registry_was_asked() -> None:
    kvbm = {"hits": {"lookups": 10}, "edges": {}, "registry": {"asked": 1200, "late": 0}}
    assert list(tier_lines(kvbm))[-1] == "registry: 1,200 look-ups"
    kvbm["registry"] = {"asked": 1, "late": 1}
    assert list(tier_lines(kvbm))[-1] == "registry: 1 look-up, 1 without an answer in time"
