"""What a configuration becomes when it is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from executors.assemble import Host, live_config
from executors.starter import Model
from twin.config_read import load


@pytest.mark.parametrize(
    ("text", "limit"), [("", 3), ("[resilience]\nmigration_limit = 0", 0), ("[resilience]\nmigration_limit = 1", 1)]
)
def test_requests_of_a_lost_worker_go_on_elsewhere_unless_the_configuration_says_otherwise(
    tmp_path: Path, text: str, limit: int
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="utf-8")
    config = load(file, {}, ("allow_no_effect=true",))
    host = Host(model=Model(checkpoint="", served_as="tiny"), pythons={}, attached={})
    served, notices = live_config(config, host)
    assert served.resilience.migration_limit == limit
    assert any("migration_limit" in notice for notice in notices) == (not text)
