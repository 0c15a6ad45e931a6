"""The Grafana dashboard (10 and later) of what the tracker prometheus shows: python -m cluster.trackers.grafana."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, ACROSS = 8, 8, 24  # of a panel, and of the page, in Grafana's units
NAME = re.compile(r"ray_gleaner_\w+")


class Panel(NamedTuple):
    """curves: legend and expression; `$` stands for the choice of runs. stacked: parts of one whole."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]
    stacked: bool = False


def _one(*names: str) -> tuple[tuple[str, str], ...]:
    """Metrics as they are; each is called by what stands behind the group's name."""
    return tuple((name.partition("_")[2], f"ray_gleaner_{name}$") for name in names)


ROWS: dict[str, tuple[Panel, ...]] = {
    "Is it learning?": (
        Panel("Reward", "none", _one("reward_mean", "reward_std")),
        Panel("Reward functions", "none", (("{{function}}", "ray_gleaner_reward$"),)),
        Panel("Held-out problems", "none", (*_one("eval_accuracy"), ("{{function}}", "ray_gleaner_eval$"))),
        Panel("Completion length (tokens)", "none", _one("rollout_completion_length", "rollout_completion_length_max")),
        Panel("Entropy and KL (nats a token)", "none", _one("policy_entropy", "policy_kl")),
        Panel("Loss and gradient norm", "none", _one("loss_total", "loss_grad_norm")),
    ),
    "Can it be trusted?": (
        Panel("Learner against sampler (nats)", "none", _one("policy_mismatch_max", "policy_mismatch_k3")),
        Panel(
            "Share of tokens by policy versions of age",
            "percentunit",
            (("{{versions}}", "ray_gleaner_policy_staleness$"),),
            stacked=True,
        ),
        Panel("Staleness (policy versions)", "none", _one("policy_staleness_mean", "policy_staleness_max")),
        Panel(
            "Shares",
            "percentunit",
            _one("reward_failed", "rollout_truncated", "policy_clip_fraction", "policy_masked_fraction"),
        ),
        Panel(
            "Completions without a reward, so far",
            "none",
            (("{{reason}}", "ray_gleaner_reward_failures_total$"),),
        ),
        Panel(
            "Replaced so far",
            "none",
            _one("rollout_restarts", "rollout_begun_anew", "buffer_dropped_stale", "loss_skipped_nonfinite"),
        ),
    ),
    "Where does the time go?": (
        Panel("Completion tokens a second", "none", _one("rollout_tokens_per_s")),
        Panel(
            "Seconds of a step in which ...",
            "s",
            _one("time_step", "time_generate", "time_train", "time_push", "time_evaluate", "time_checkpoint"),
        ),
        Panel("Seconds of waiting", "s", _one("time_wait", "time_generator_idle", "time_learner_idle")),
        Panel("Steps", "none", _one("step")),
        Panel("Since the newest step", "s", (("{{run}}", "time() - ray_gleaner_step_at$"),)),
        Panel("Groups waiting in the Buffer", "none", _one("buffer_groups", "reward_zero_variance_groups")),
    ),
    "Does it fit?": (
        Panel("Learner: measured and planned", "bytes", _one("memory_learner_peak", "memory_learner_planned")),
        Panel("Generator: measured and planned", "bytes", _one("memory_generator_peak", "memory_generator_planned")),
        Panel("Micro-batch (tokens)", "none", _one("memory_token_budget", "memory_oom_retries")),
    ),
}


def queried() -> set[str]:
    """The metrics that the dashboard asks for, as Prometheus has them."""
    return {name for panels in ROWS.values() for panel in panels for _, ex in panel.curves for name in NAME.findall(ex)}


def dashboard() -> dict[str, Any]:
    """What Grafana imports: it asks which Prometheus, and which runs."""
    return {
        "uid": "gleaner", "title": "gleaner", "tags": ["gleaner"], "schemaVersion": 39, "version": 1, "editable": True,
        "timezone": "browser", "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "graphTooltip": 1,
        "annotations": {"list": []}, "links": [], "templating": {"list": _variables()}, "panels": list(_panels()),
    }  # fmt: skip


def _variables() -> list[dict[str, Any]]:
    runs = "label_values(ray_gleaner_step, run)"
    every = {"text": "All", "value": "$__all"}
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1},
        {
            "name": "run", "label": "Run", "type": "query", "datasource": SOURCE, "definition": runs,
            "query": {"query": runs, "refId": "runs"}, "refresh": 2, "multi": True, "includeAll": True,
            "current": every, "sort": 1,
        },
    ]  # fmt: skip


def _panels() -> Iterator[dict[str, Any]]:
    """Row by row; ids count from 1."""
    number, y = 1, 0
    for title, panels in ROWS.items():
        yield {
            "id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": ACROSS, "h": 1},
        }  # fmt: skip
        number, y = number + 1, y + 1
        for place, panel in enumerate(panels):
            down, across = divmod(place * WIDTH, ACROSS)
            at = {"x": across, "y": y + down * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield {"id": number, "gridPos": at, **_timeseries(panel)}
            number += 1
        y += HEIGHT * -(-len(panels) * WIDTH // ACROSS)


def _timeseries(panel: Panel) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expression.replace("$", '{run=~"$run"}', 1),
            "legendFormat": legend if legend == "{{run}}" else f"{legend} {{{{run}}}}",
        }
        for place, (legend, expression) in enumerate(panel.curves)
    ]  # fmt: skip
    style: dict[str, Any] = {"lineWidth": 1, "showPoints": "auto", "spanNulls": True}
    if panel.stacked:
        style |= {"fillOpacity": 20, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "type": "timeseries", "title": panel.title, "datasource": SOURCE, "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": style}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "none"},
        },
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
