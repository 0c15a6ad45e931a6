"""The values at the engine's border, the environment check, the adapter window and the CPU LoRA op: no model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from rollout.engine import EngineSettings
from rollout.types import Adapter, AdapterCorrupt, EngineError, Sampling
from rollout.vllm import convert
from rollout.vllm.convert import AdapterWindow
from rollout.vllm.environment import check_env, required_env


def adapter(version: int, *names: str) -> Adapter:
    payload = save({name: np.full(2, version, np.float32) for name in names or ("q.lora_A", "q.lora_B")})
    return Adapter.build(version, payload, {"r": 8})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": 0.001}, "at least 0.01"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 0.0}, "set n=1"),
        ({"seed": -1}, "seed"),
    ],
)
def test_sampling_refuses_what_vllm_would_change_or_refuse_late(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**({"n": 2, "max_tokens": 4} | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "fp8"},
        {"adapter_window": 1},
        {"kv_cache_bytes": 0},
        {"max_num_seqs": 0},
        {"in_flight": "abort"},
        {"in_flight": "continue"},  # with a window of 2
    ],
)
def test_settings_name_the_field_that_is_wrong(fields: dict[str, Any]) -> None:
    good = EngineSettings("m", "float32", 64, 1 << 20, 8, 8, 2, 0)
    with pytest.raises(ValueError, match=next(iter(fields))):
        dataclasses.replace(good, **fields)


def test_an_adapter_knows_when_its_payload_was_damaged() -> None:
    good = adapter(3)
    assert good.digest == hashlib.sha256(good.payload).hexdigest()
    good.verify()
    with pytest.raises(AdapterCorrupt, match=r"adapter v3: .* send it again"):
        dataclasses.replace(good, payload=bytes(good.payload) + b"\0").verify()
    with pytest.raises(ValueError, match="at least 0"):
        adapter(-1)


@pytest.mark.parametrize("cuda", [True, False])
def test_the_required_environment_passes_its_own_check(cuda: bool) -> None:
    check_env(cuda, required_env(cuda))
    for name in required_env(cuda):
        with pytest.raises(EngineError, match=name):
            check_env(cuda, {k: v for k, v in required_env(cuda).items() if k != name})


PRODUCTS = """
import torch
def product(rows):
    torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 8), torch.ones(8, 8), None, "none", [], "")
for rows in (1, *range(2, 300), 1):
    product(rows)
"""


def test_a_generator_on_a_cpu_does_not_keep_a_kernel_for_each_number_of_tokens_that_it_has_met() -> None:
    """oneDNN's own words: the first shape has to be made anew after hundreds of others, whose memory is free again."""
    environment = os.environ | required_env(cuda=False) | {"ONEDNN_VERBOSE": "profile_create"}
    said = subprocess.run(
        [sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True, check=True
    ).stdout
    made = [line for line in said.splitlines() if "create:cache" in line]
    assert len(made) == 300
    assert "create:cache_miss" in made[-1]


def test_the_environment_may_differ_where_that_is_harmless() -> None:
    check_env(False, required_env(False) | {"OMP_NUM_THREADS": "8", "VLLM_LOGGING_LEVEL": "DEBUG"})
    with pytest.raises(EngineError, match="must be '0', got '1'"):
        check_env(False, required_env(False) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    with pytest.raises(EngineError, match="must not be set on CUDA"):
        check_env(True, required_env(True) | {"TORCH_COMPILE_DISABLE": "1"})


def test_staging_writes_what_peft_reads_and_digests_what_was_written() -> None:
    window = AdapterWindow(2)
    staged = window.stage(adapter(0))
    assert staged.digest == adapter(0).digest
    assert staged.keys == {"q.lora_A", "q.lora_B"}
    assert (staged.folder / "adapter_model.safetensors").read_bytes() == adapter(0).payload
    assert json.loads((staged.folder / "adapter_config.json").read_text()) == {"r": 8}
    window.clear()
    assert not staged.folder.exists()


def test_a_full_disk_is_told_with_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_WEIGHTS", "/dev/full")
    window = AdapterWindow(2)
    with pytest.raises(OSError, match="No space left on device: '.*gleaner-adapters-.*v0-"):
        window.stage(adapter(0))
    window.clear()


def test_the_window_spares_the_newest_and_those_in_use() -> None:
    window = AdapterWindow(3)
    residents = [window.stage(adapter(version)) for version in range(3)]
    for resident in residents:
        assert not window.is_full()
        window.check(resident)
        window.add(resident)
    assert window.is_full()
    assert window.newest is residents[2]
    assert window.evictable() is residents[0]
    residents[0].users = 1
    assert window.evictable() is residents[1]
    residents[1].users = 1
    assert window.evictable() is None
    residents[0].users = 0
    window.drop(residents[0])
    assert window.residents == residents[1:]
    assert not residents[0].folder.exists()
    window.clear()


@pytest.mark.parametrize(("capacity", "ids"), [(1, [1, 1]), (2, [1, 6])])
def test_ids_are_never_used_twice_except_in_a_window_of_one(capacity: int, ids: list[int]) -> None:
    window = AdapterWindow(capacity)
    assert [window.stage(adapter(version)).lora_id for version in (0, 5)] == ids
    window.clear()


def test_the_window_refuses_old_versions_other_modules_and_rubbish() -> None:
    window = AdapterWindow(2)
    window.add(window.stage(adapter(5)))
    with pytest.raises(EngineError, match="above v5"):
        window.check(window.stage(adapter(5)))
    with pytest.raises(EngineError, match=r"1 missing \['q.lora_B'\], 1 unknown \['k.lora_B'\]"):
        window.check(window.stage(adapter(6, "q.lora_A", "k.lora_B")))
    for payload in (b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{{"):
        with pytest.raises(EngineError, match="must be safetensors"):
            window.stage(Adapter.build(6, payload, {}))
    root = Path(window._root.name)
    assert len(list(root.iterdir())) == 3, "a payload that cannot be staged leaves no folder"
    window.clear()


class TestCpuLora:
    @pytest.fixture
    def wrapper(self) -> Any:
        pytest.importorskip("vllm")
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            pytest.skip("the op replaces vLLM's CPU backend only")
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        return PunicaWrapperCPU

    @pytest.fixture
    def as_upstream(self, wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Upstream's op in place, whatever an earlier test installed, and whatever this one installs undone."""
        from rollout.vllm import cpu as cpu_lora

        metadata = wrapper._update_prefill_metadata
        closure = metadata.__closure__
        if wrapper.add_lora_linear is cpu_lora._add_lora_linear:
            metadata = closure[0].cell_contents
        monkeypatch.setattr(wrapper, "_update_prefill_metadata", metadata)
        monkeypatch.setattr(wrapper, "add_lora_linear", _slow_reference)
        return cpu_lora

    def test_it_installs_and_agrees_with_a_dense_computation(self, wrapper: Any, as_upstream: Any) -> None:
        assert as_upstream.install_fast_cpu_lora()
        assert as_upstream._self_check(wrapper) < 1e-5
        for dtype in (torch.bfloat16, torch.float16):
            # Numbers of up to 64, rounded once; packed ones thrice.
            steps = 64 if dtype == torch.bfloat16 and as_upstream._bfloat16_is_fast() else 16
            assert 0 < as_upstream._self_check(wrapper, dtype) <= steps * torch.finfo(dtype).eps
        assert as_upstream.install_fast_cpu_lora(), "twice is once"

    def test_an_unknown_release_keeps_upstreams_op(
        self, wrapper: Any, as_upstream: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("vllm.__version__", "0.99.1")
        assert not as_upstream.install_fast_cpu_lora()
        assert wrapper.add_lora_linear is _slow_reference
        assert "0.31 to 0.32, this is 0.99.1" in caplog.text

    def test_an_op_that_is_off_is_taken_out_again(
        self, wrapper: Any, as_upstream: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(as_upstream, "_runs", lambda _: [(0, 9, 0)])
        assert not as_upstream.install_fast_cpu_lora()
        assert wrapper.add_lora_linear is _slow_reference
        assert "from a dense computation" in caplog.text

    def test_a_packed_product_that_is_off_takes_the_op_out_too(
        self, wrapper: Any, as_upstream: Any, packs: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        pack = as_upstream._pack
        monkeypatch.setattr(as_upstream, "_pack", lambda a, b: pack(a, [part * 1.1 for part in b]))
        assert not as_upstream.install_fast_cpu_lora()
        assert "allowed in torch.bfloat16" in caplog.text

    @pytest.fixture
    def packs(self, wrapper: Any) -> None:
        from rollout.vllm import cpu as cpu_lora

        if not cpu_lora._bfloat16_is_fast():
            pytest.skip("this processor does not multiply in bfloat16")

    @pytest.mark.parametrize(
        ("rank", "widths", "rows"),
        [(1, (16,), 1), (8, (576, 192, 192), 5), (24, (48, 16), 33), (32, (576, 192, 192), 200), (40, (8, 24), 33)],
    )
    def test_packed_products_are_those_of_float32(
        self, packs: None, rank: int, widths: tuple[int, ...], rows: int
    ) -> None:
        """Slices in one product with B and in one each; (8, 24): widths that the kernel takes together only."""
        from rollout.vllm import cpu as cpu_lora

        x, y, a, b = _lora_layer(rows, 96, widths, rank)
        assert cpu_lora._packs(x, a[0], widths)
        assert not cpu_lora._packs(x.float(), a[0], widths)
        assert not cpu_lora._packs(x[:, :40].contiguous(), a[0], widths)
        assert rows == 1 or not cpu_lora._packs(x[:, :64], a[0], widths), "rows with something between them"
        assert not cpu_lora._packs(x[:0], a[0], widths)
        assert not cpu_lora._packs(x, a[0], (*widths, 8))
        expected = y.float() + torch.cat(
            [x.float() @ one[1, 0].t() @ other[1, 0].t() for one, other in zip(a, b, strict=True)], 1
        )
        packed = cpu_lora._packed(a, b, 1)
        assert len(packed.b) == (len(widths) if rank * len(widths) > 32 and widths[0] % 16 == 0 else 1)
        cpu_lora._add_packed(y, x, packed, 1.0, {})
        assert (y.float() - expected).abs().max() <= 2**-7 * expected.abs().max()

    def test_a_slot_that_is_written_is_packed_again(self, packs: None) -> None:
        from rollout.vllm import cpu as cpu_lora

        _, _, a, b = _lora_layer(4, 64, (32, 32), 8)
        with torch.inference_mode():  # in which vLLM writes slots, though it does not make them in it
            first = cpu_lora._packed(a, b, 0)
            assert cpu_lora._packed(a, b, 0) is first
            other_slot = cpu_lora._packed(a, b, 1)
            for stack in (*a, *b):
                stack[0, 0, :4, :4].copy_(torch.ones(4, 4))
                second = cpu_lora._packed(a, b, 0)
                pairs = zip((first.a, *first.b), (second.a, *second.b), strict=True)
                assert not all(torch.equal(one, other) for one, other in pairs)
                first = second
            cpu_lora.forget_packed(a)
            again = cpu_lora._packed(a, b, 0)
            assert again is not first
            assert torch.equal(again.a, first.a)
            b[1][0] = 0  # vLLM's way to empty a slot
            assert not torch.equal(cpu_lora._packed(a, b, 0).b[-1], first.b[-1])
            assert torch.equal(cpu_lora._packed(a, b, 1).a, other_slot.a)


def _lora_layer(
    rows: int, width_in: int, widths: tuple[int, ...], rank: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Inputs and outputs in bfloat16, and two slots of A and of B per slice, as vLLM holds them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    a = tuple(draw(2, 1, rank, width_in).float() for _ in widths)
    b = tuple(draw(2, 1, width, rank).float() for width in widths)
    return draw(rows, width_in), draw(rows, sum(widths)), a, b


def _slow_reference(*_: Any) -> None:
    """Stands for upstream's op."""
