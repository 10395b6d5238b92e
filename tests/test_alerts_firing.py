"""A real server in trouble, scraped by a real Prometheus: every alert fires for its own reason; in health none does.

Windows and patience are cut to seconds (`quickened`), thresholds are those of the rules. Nothing is faked: the model's
weights are changed, the disk is taken away, the model is held, the settings file is broken.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvboost import KVBoost
from kvboost.hf.prefill import model_lock
from kvboost.metrics import Metrics
from kvboost.server import ServerOptions, make_app
from kvboost.server.observing import Observing
from kvboost.server.xray import RequestRing
from kvboost.serving.scheduler import Scheduler
from prometheus_server import PrometheusServer, quickened
from server_run import STORY, address, eventually, open_service, post, serving, stories

ROOT = Path(__file__).resolve().parents[1]
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())
ALERTS = {rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
DOCUMENT = (
    STORY + "After that they all went home and had some soup. Then Lily went to bed and slept until the sun came. "
)
WORDS = (
    "ball", "bird", "blue", "boat", "car", "cat", "day", "dog", "girl", "green", "happy", "hat", "home", "jump", "moon",
    "park", "play", "red", "run", "sad", "sun", "tree",
)  # fmt: skip
LOUD = 30.0  # times by which a channel of the keys is made louder: 5 dB more from peak to noise


@dataclass
class Server:
    """A server over the small model, and the files that it lives on."""

    url: str
    kv: KVBoost
    service: Scheduler
    settings: Path
    disk: Path

    def ask(self, text: str, **more: Any) -> int:
        """Asks for two tokens; returns the status."""
        body = {"model": "stories", "prompt": text, "max_tokens": 2, "temperature": 0, **more}
        return post(f"{self.url}/v1/completions", json=body).status_code

    def write_settings(self, **values: str) -> None:
        """A new version of the watched file, whole at once."""
        new = self.settings.with_suffix(".new")
        new.write_text("".join(f"KVBOOST_{name.upper()}={value}\n" for name, value in values.items()))
        os.replace(new, self.settings)


@contextmanager
def served(shared_data: Path, folder: Path, **flags: Any) -> Iterator[Server]:
    """A server as `kvboost serve` makes it, its metrics on the main port."""
    settings, disk = folder / "settings", folder / "disk"
    settings.write_text("")
    kv = stories(shared_data, settings_file=str(settings), disk_directory=str(disk), codec="int8", **flags)
    with kv, open_service(kv, slots=1, queue=16) as service:
        metrics = Metrics(kv, model="stories", service_stats=service.stats)
        observe = Observing(metrics, RequestRing())
        app = make_app(service, kv, ServerOptions("stories"), observe=observe, expose=metrics.expose)
        with serving(app) as url:
            yield Server(url, kv, service, settings, disk)


@contextmanager
def traffic(send: Callable[[int], object], pause_s: float = 0.05) -> Iterator[None]:
    """Calls `send` with 0, 1, ... on a thread of its own until the block ends; raises what it raised."""
    stop = threading.Event()

    def run() -> None:
        number = 0
        while not stop.wait(pause_s):
            send(number)
            number += 1

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield
        finally:
            stop.set()
        running.result()


def head(number: int) -> str:
    """A beginning that no other request has, long enough that what follows can be moved."""
    return " ".join(random.Random(number).choices(WORDS, k=30)).capitalize() + ". "


def make_keys_loud(kv: KVBoost, factor: float) -> None:
    """Scales one channel of the keys of every head, as an update of the weights would."""
    for layer in kv.model.model.layers:
        with torch.no_grad():
            layer.self_attn.k_proj.weight[:: kv.model.config.head_dim] *= factor


def break_weights(kv: KVBoost) -> None:
    """No distribution comes of the model any more."""
    with torch.no_grad():
        kv.model.get_output_embeddings().weight.fill_(torch.nan)


def take_away(directory: Path) -> None:
    """Leaves a file where the directory was: it can neither be used nor made anew, whoever asks."""
    directory.rename(directory.with_suffix(".gone"))
    directory.write_text("")


# --- in trouble ------------------------------------------------------------------------------------------------------


def test_every_alert_fires_for_its_own_reason(shared_data: Path, tmp_path: Path) -> None:
    seen: set[str] = set()
    with ExitStack() as running:
        server = running.enter_context(served(shared_data, tmp_path, gate=False, min_moved_share=0.0))
        make_keys_loud(server.kv, LOUD)
        assert server.ask(head(0) + DOCUMENT) == 200
        host, port = address(server.url)
        with PrometheusServer(tmp_path, f"{host}:{port}", quickened(RULES)) as prometheus:
            eventually(lambda: prometheus.query("kvboost_quant_error_psnr_at_load") != [])
            for provoke in (bad_surroundings, wrong_answers, held_model, broken_and_off):
                seen |= provoke(server, prometheus)
            running.close()
            seen |= fired(prometheus, "KVBoostMetricsAbsent")
    assert seen == ALERTS, "an alert without a provocation here, or one that is not in the rules"


def fired(prometheus: PrometheusServer, *names: str) -> set[str]:
    """The names, once all of them have fired."""
    wanted = set(names)
    assert prometheus.wait_until_firing(wanted, 40) == wanted
    return wanted


def bad_surroundings(server: Server, prometheus: PrometheusServer) -> set[str]:
    """Other weights, no disk, a broken settings file, and prompts of which all that is found is computed again."""
    make_keys_loud(server.kv, 1 / LOUD)
    take_away(server.disk)
    server.write_settings(fidelity="perfect")
    server.ask(head(1) + DOCUMENT)
    with traffic(lambda n: server.ask(head(2 + n) + DOCUMENT, kvboost={"recompute_ratio": 1.0})):
        return fired(
            prometheus, "KVBoostHitRateLow", "KVBoostRecomputeRatioHigh", "KVBoostQuantizationWorse",
            "KVBoostTierErrors", "KVBoostSettingsRejected",
        )  # fmt: skip


def wrong_answers(server: Server, prometheus: PrometheusServer) -> set[str]:
    """Moved text is not repaired, every answer is checked, and next to no error is allowed."""
    server.write_settings(shadow_share="1", recompute_strategy="none", risk_bound="0.00001")
    with traffic(lambda n: server.ask(head(10_000 + n) + DOCUMENT), pause_s=0.2):
        return fired(prometheus, "KVBoostShadowErrorHigh", "KVBoostMovedSuspended")


def held_model(server: Server, prometheus: PrometheusServer) -> set[str]:
    """Somebody else has the model for long; requests wait for it, and for one another."""
    with ThreadPoolExecutor(3) as crowd:
        with model_lock(server.kv.model):
            answers = [crowd.submit(server.ask, head(20_000 + n)) for n in range(3)]
            began = time.monotonic()
            queued = fired(prometheus, "KVBoostQueueNeverEmpty")
            time.sleep(max(0.0, 6.0 - (time.monotonic() - began)))  # longer than a first token may take
        assert {answer.result() for answer in answers} == {200}
    return queued | fired(prometheus, "KVBoostFirstTokenSlow")


def broken_and_off(server: Server, prometheus: PrometheusServer) -> set[str]:
    """The cache is switched off, and the model gives no numbers: not every failure is the cache's."""
    server.write_settings(disable="1")
    break_weights(server.kv)
    with traffic(lambda n: server.ask(head(30_000 + n), temperature=1)):
        return fired(prometheus, "KVBoostRequestsFailed", "KVBoostDisabledLong")


# --- in health -------------------------------------------------------------------------------------------------------


def test_a_healthy_server_with_warm_traffic_fires_none(shared_data: Path, tmp_path: Path) -> None:
    with served(shared_data, tmp_path) as server:
        prompts = [head(n) + DOCUMENT for n in range(4)]
        for text in prompts:
            assert server.ask(text) == 200
        assert server.kv.flush()
        host, port = address(server.url)
        ever: set[str] = set()
        with (
            traffic(lambda n: server.ask(prompts[n % len(prompts)])),
            PrometheusServer(tmp_path, f"{host}:{port}", quickened(RULES)) as prometheus,
        ):
            eventually(lambda: prometheus.query("kvboost_cache_hit_rate") != [])
            eventually(lambda: "KVBoostMetricsAbsent" not in prometheus.firing())  # before the first scrape
            until = time.monotonic() + 9  # longer than any window and patience
            while time.monotonic() < until:
                ever |= prometheus.firing()
                time.sleep(0.2)
            (rate,) = prometheus.query("kvboost_cache_hit_rate")
            assert float(rate["value"][1]) == pytest.approx(1.0, abs=0.05)
            asked = prometheus.query("sum(increase(kvboost_requests_total[5s]))")
            assert float(asked[0]["value"][1]) > 5, "there was no traffic"
    assert ever == set()
