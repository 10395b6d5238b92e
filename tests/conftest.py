"""What all tests share: the embedded models, the shared data, one seed, and the rule about skips."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched from a model hub

import logging
import random
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvboost.errors import ModelError
from kvboost.hf import embedded
from redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[1]
NO_SHARED_DATA = "the data folder shared/data, beside the repository, is absent"
skips_key = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails the session (for CI)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[skips_key] = []
    torch.set_num_threads(1)  # tiny models: a second thread only waits for a busy core


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("may_skip") is None:
        note_skip(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        note_skip(collector.config, report)
    return report


def note_skip(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if NO_SHARED_DATA not in reason:
        config.stash[skips_key].append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--no-skips") and session.config.stash[skips_key]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--no-skips") and config.stash[skips_key]:
        terminalreporter.section("skipped, which --no-skips forbids", red=True)
        for line in config.stash[skips_key]:
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _clean_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts from the same seeds, without settings of the environment or what the CLI did to logging."""
    logging.getLogger("kvboost").setLevel(logging.NOTSET)
    for name in [n for n in os.environ if n.startswith("KVBOOST_")]:
        monkeypatch.delenv(name)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # for libraries that draw from it
    torch.manual_seed(0)


def ensure_or_skip(model: embedded.EmbeddedModel) -> Path:
    try:
        return embedded.ensure(model)
    except ModelError as error:
        pytest.skip(f"the embedded model {model.name} cannot be had: {error}")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Directory of SmolLM2-135M-Instruct: Llama architecture, full attention, a chat template."""
    return ensure_or_skip(embedded.SMOLLM2)


@pytest.fixture(scope="session")
def gemma3_dir() -> Path:
    """Directory of Gemma 3 270M: five sliding layers to one full, two rotary bases, no chat template."""
    return ensure_or_skip(embedded.GEMMA3)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data sets beside the repository; tests must not depend on them for the promise they check."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(NO_SHARED_DATA)
    return path


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server for all tests that leave it as it is; they keep apart by prefixes of their own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()
