# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""torch.compile: functions made to break the backend, equal to eager in values, dtypes, strides and aliasing."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import Graphs, assert_same, compile_
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from iree_marshal import backend
from iree_marshal.backend import FallbackWarning, toolchain
from iree_marshal.backend.compiled import _extent


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(Path(tmp_path_factory.getbasetemp(), "compiled")))
    torch.manual_seed(0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


def _copied(values: Any) -> Any:
    """Copy tensors with their strides."""

    def copy(value: torch.Tensor) -> torch.Tensor:
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return fresh.copy_(value.detach()).requires_grad_(value.requires_grad)

    return tree_map(lambda value: copy(value) if isinstance(value, torch.Tensor) else value, values)


def _sharing(*values: Any) -> tuple[list[tuple[int, int]], list[int]]:
    """Which tensors have bytes in common, and which are one object."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    extents = [_extent(tensor.detach()) for tensor in tensors]
    common = [
        (place, other)
        for place, (start, end) in enumerate(extents)
        for other, (other_start, other_end) in enumerate(extents[:place])
        if start < other_end and other_start < end
    ]
    first: dict[int, int] = {}
    return common, [first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]


def _agrees(function: Callable[..., Any], *calls: tuple[Any, ...], tolerance: float = 1e-4, **options: Any) -> None:
    """Call three times with each tuple of arguments: checked, through the wrapper, past it."""
    run = compile_(function, **options)
    for arguments in calls * 3:
        ours, eager = _copied(arguments), _copied(arguments)
        result, wanted = run(*ours), function(*eager)
        assert_same(result, wanted, tolerance)
        assert_same(ours, eager, tolerance)
        assert _sharing(ours, result) == _sharing(eager, wanted)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# ---- sizes ---------------------------------------------------------------------------------------


def test_numbers_computed_from_sizes(graphs: Graphs) -> None:
    def function(x: torch.Tensor) -> tuple[Any, ...]:
        rows, columns = x.shape
        return x / math.sqrt(columns), x * (1 / rows), x + float(rows), rows / 3, x * (rows // 2)

    _agrees(function, (_x(3, 4),), (_x(5, 9),), (_x(8, 2),), dynamic=True)
    assert len(graphs.compiled) == 1


def test_a_size_that_is_left_to_be_found(graphs: Graphs) -> None:
    """A -1 beside symbols, and an integer that is found to be one only after it was traced as any."""
    _agrees(
        lambda x, count: (x.view(count, -1, 4).sum(1), x.reshape(-1, 2 * x.shape[1]), count * 2, None),
        (_x(6, 4), 2),
        (_x(6, 4), 3),
        (_x(12, 4), 1),
        dynamic=True,
    )
    assert not graphs.eager


@pytest.mark.parametrize(
    "make",
    [
        lambda n: _x(n, 4),
        lambda n: _x(4, n).t(),
        lambda n: _x(2 * n, 4)[::2],
        lambda n: _x(n, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=["row_major", "transposed", "strided", "channels_last"],
)
def test_layouts_of_dynamic_sizes(make: Callable[[int], torch.Tensor], graphs: Graphs) -> None:
    _agrees(
        lambda x: (torch.relu(x) + 1, x.sum(0), x[1:], torch.cat([x, x])[::2]), *[(make(n),) for n in (3, 7, 5)],
        dynamic=True,
    )  # fmt: skip
    assert not graphs.eager


def test_sizes_zero_and_one(graphs: Graphs) -> None:
    _agrees(lambda x: (x + 1, x.sum(), x.t()), (_x(3, 4),), (_x(1, 4),), (_x(0, 4),), dynamic=True)
    _agrees(lambda x: (x * 2, x.transpose(0, 2), x.sum(1), x.reshape(0)), (_x(4, 0, 3),))
    assert not graphs.eager


def _same_memory(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = x - y
    return z, z, z.detach(), z.view(-1), z[::2, 1]


# ---- aliasing and mutation ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x[1:], x.view(6, 4), x.t()[2], x.unsqueeze(0).expand(3, 4, 6), x.diagonal(), y + 1),
        lambda x, y: (x.add_(y), x.t(), y, x),
        lambda x, y: (x[1].add_(5), x.t()[0].zero_(), x.sum())[2],
        lambda x, y: (x.t_() * 2, y.unsqueeze(0).transpose_(0, 1)),
        lambda x, y: ((x + 1)[1:].mul_(2), (x * 3).as_strided((3, 4), (4, 1))),
        lambda x, y: [x * 2, {"a": (x * 2).t(), "b": None}, (x, 3, "s", 2.5)],
        _same_memory,
    ],
    ids=["views", "returned", "through_views", "metadata", "inner", "nested", "same"],
)
def test_results_share_what_eagers_share(function: Callable[..., Any]) -> None:
    _agrees(function, (_x(4, 6), _x(4, 6) * 2))


def test_arguments_that_share_memory_and_are_written() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    run = compile_(function, fallback=True)
    for call in range(3):
        ours, eager = torch.arange(8.0), torch.arange(8.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_same(run(ours[:4], ours[2:6]), function(eager[:4], eager[2:6]))
        # torch traces the memory that both are views of, which the compiler does not take.
        assert [warning.category for warning in caught] == [FallbackWarning] * (call == 0)
        assert_same(ours, eager)


def test_a_cache_of_keys_and_values(graphs: Graphs) -> None:
    def function(cache: torch.Tensor, key: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, place, key)
        return (cache @ key.transpose(1, 2)).softmax(1)

    run = compile_(function)
    ours, eager = torch.zeros(2, 8, 4), torch.zeros(2, 8, 4)
    for place in range(5):
        key = torch.randn(2, 1, 4)
        assert_same(run(ours, key, torch.tensor([place])), function(eager, key, torch.tensor([place])))
        assert_same(ours, eager)
    assert len(graphs.compiled) == 1


# ---- values ----------------------------------------------------------------------------------------


def test_not_a_number_stays_one(graphs: Graphs) -> None:
    """IREE compares and selects where torch hands NaN on."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bounded = x.clamp(0, 1), x.clamp_min(0), x.clamp_max(0), torch.clamp(x, y, y + 1), functional.hardtanh(x)
        return *bounded, torch.maximum(x, y), torch.minimum(x, y), torch.maximum(y, x), functional.relu6(x), x.amax()

    numbers = torch.tensor([1.0, 0.0, -1.0, math.inf, -math.inf, math.nan, math.nan])
    # The first call, which is checked, meets no NaN: nothing but the program can be right about the second.
    _agrees(function, (torch.linspace(-2, 2, 7), torch.zeros(7)), (numbers, numbers.flip(0)))
    assert not graphs.eager


_U8 = torch.randint(0, 256, (4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

_PLACES = torch.tensor([3, 0, -1, 2])
_ONE = (_x(4, 5),)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x: (x**2, x**3, x ^ 3, torch.fmod(x, 3), x % 3, x.roll(2, 0)), (torch.arange(-5, 5),)),
        (lambda x: (x.any(), x.any(1), x.all(), x ^ 5, ~x, x << 1, x >> 1), (_U8,)),
        (lambda m, i: (m ^ True, m & ~m, m.cumsum(0), torch.where(m, i, -i)), (_U8[0] > 99, torch.arange(5))),
        (lambda x: (x @ torch.eye(5), x.roll((1, -2), (0, 1)), x.roll(3), torch.empty_like(x.t()).fill_(2)), _ONE),
        (lambda x: (functional.max_pool2d(x, 3, 2, 1), functional.avg_pool2d(x, 2, ceil_mode=True)), (_x(1, 4, 5),)),
        (lambda x, i: (x[i, i.abs() % 5], x.gather(1, i.abs()[:, None]), x.take(i.abs())), (_x(4, 5), _PLACES)),
        (lambda x, h, b: (x + h, h + b, x * b, h.double(), b.half()), (_x(4).double(), _x(4).half(), _x(4).bfloat16())),
    ],
    ids=["integers", "bytes", "booleans", "made_inside", "one_image", "indices", "mixed_floats"],
)  # fmt: skip
def test_operators_the_compiler_needs_help_with(
    function: Callable[..., Any], arguments: tuple[Any, ...], graphs: Graphs
) -> None:
    _agrees(function, arguments, tolerance=2e-2 if arguments[0].dtype == torch.float64 else 1e-4)
    assert not graphs.eager


# ---- modules and modes ----------------------------------------------------------------------------


class _Switching(nn.Module):
    """Batch norm, buffers, a frozen part, grad mode switched on the way, parameters among the results."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Conv2d(3, 4, 3, padding=1), "b": nn.ModuleList([nn.BatchNorm2d(4)])})
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        y = self.parts["a"](x)
        with torch.no_grad():
            middle = y.mean()
        for norm in self.parts["b"]:
            y = torch.relu(norm(y - middle))
        out = self.head(self.frozen(y.mean((2, 3))))
        return {"out": out, "middle": middle, "weight": self.head.weight, "view": (out[0], [None, self.calls])}


@pytest.mark.parametrize("wanting", [False, True], ids=["weights", "inputs_too"])
def test_a_training_step_with_everything(wanting: bool, graphs: Graphs) -> None:
    ours, eager = _Switching(), _Switching()
    eager.load_state_dict(ours.state_dict())
    run = compile_(ours)
    for step in range(3):
        x, y = (_x(4, 3, 6, 6).add(step).requires_grad_(wanting) for _ in range(2))
        for module, result in ((ours, run(x)), (eager, eager(y))):
            module.zero_grad()
            (result["out"].square().sum() + result["view"][0].sum()).backward()
        assert_same(x.grad, y.grad, 1e-3)
        assert_same([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()], 1e-3)
        assert_same(dict(ours.named_buffers()), dict(eager.named_buffers()), 1e-3)
    assert len(graphs.compiled) == 2
    assert not graphs.eager


def test_gradients_of_slices_of_dynamic_sizes(graphs: Graphs) -> None:
    """IREE lets two writes into zeros share the zeros; gradients of slices were such writes."""

    def function(x: torch.Tensor) -> torch.Tensor:
        halves = torch.cat([-x[..., 2:], x[..., :2]], -1)
        return halves * x + x[:, 1:2] + x[..., -1:] + x[:, 0:1, ::2].sum() + x.roll(1, 1)

    run = compile_(function, dynamic=True)
    for length in (5, 7, 4):
        x, y = (_x(2, length, 4).requires_grad_() for _ in range(2))
        run(x).square().sum().backward()
        function(y).square().sum().backward()
        assert_same(x.grad, y.grad, 1e-3)
    assert not graphs.eager


@pytest.mark.parametrize("last", [2, -1])
def test_gradients_of_elements(last: int, graphs: Graphs) -> None:
    run = compile_(lambda x: x[0] * x[last] + x[:, last])
    x, y = (_x(3, 3).requires_grad_() for _ in range(2))
    run(x).square().sum().backward()
    (y[0] * y[last] + y[:, last]).square().sum().backward()
    assert_same(x.grad, y.grad, 1e-3)
    assert not graphs.eager


def test_gradients_of_what_was_taken_apart(graphs: Graphs) -> None:
    layer = nn.Linear(4, 4)
    eager = nn.Linear(4, 4)
    eager.load_state_dict(layer.state_dict())

    def function(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        both = torch.maximum(y, x) + torch.minimum(y, x * 0) + functional.hardtanh(y) + y.clamp(-0.1, 0.2)
        out: torch.Tensor = functional.max_pool2d(both[None], 2, 1).sum() + functional.relu6(both * 9).roll(1, 0).sum()
        return out

    run = compile_(lambda x: function(layer, x))
    for _ in range(2):
        run(_x(4, 4)).backward()
        function(eager, _x(4, 4)).backward()
    assert_same([p.grad for p in layer.parameters()], [p.grad for p in eager.parameters()], 1e-3)
    assert not graphs.eager


def test_modes_of_the_caller(graphs: Graphs) -> None:
    layer = nn.Linear(8, 8)
    run, x = compile_(layer), _x(4, 8)
    modes = (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), torch.enable_grad)
    for mode in modes * 2:
        with mode():
            ours, eager = run(x), layer(x)
            assert ours.requires_grad == eager.requires_grad
            assert_same(ours.detach(), eager.detach(), 2e-2)
    assert not graphs.eager


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_graph_breaks_and_branches(graphs: Graphs) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = first(x)
        torch._dynamo.graph_break()
        if y.sum() > 0:
            y = y * 2
        out: torch.Tensor = second(torch.relu(y))
        return out

    run = compile_(function)
    for sign in (1, -1, 1, -1):
        x, y = (_x(3, 4).mul(sign).requires_grad_() for _ in range(2))
        run(x).sum().backward()
        function(y).sum().backward()
        assert_same(x.grad, y.grad, 1e-3)
    assert not graphs.eager


# ---- the machinery -------------------------------------------------------------------------------------


def test_first_calls_from_several_threads(graphs: Graphs) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).requires_grad_(False)
    run = compile_(model)
    start, found = threading.Barrier(4), []

    def work(seed: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        start.wait()
        found.extend(torch.allclose(run(x), model(x), atol=1e-5) for _ in range(20))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80
    assert not graphs.eager


def test_two_models_share_a_program_and_not_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(tmp_path))
    models = [nn.Linear(8, 8).requires_grad_(False) for _ in range(2)]
    runs = [compile_(model) for model in models]
    for _ in range(3):
        x = torch.randn(4, 8)
        for run, model in zip(runs, models, strict=True):
            assert_same(run(x), model(x))
    assert len(list(tmp_path.glob("*.vmfb"))) == 1


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    x = torch.randn(4)
    assert_same(compile_(lambda x: x * 11)(x), x * 11)
    assert "cannot keep a compiled module" in caplog.text


def test_a_compiler_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.compiler_version()
    monkeypatch.setattr(toolchain, "compiler_path", lambda: tmp_path / "iree-compile")
    x = torch.randn(4)
    with pytest.warns(FallbackWarning, match=r"graph \d+ .*FileNotFoundError.*iree-compile"):
        assert_same(compile_(lambda x: x * 12, fallback=True)(x), x * 12)


@pytest.mark.parametrize(
    ("options", "mode", "match"),
    [
        ({"verifi": "never"}, None, "did you mean 'verify'"),
        ({"flags": ["--no-such-flag"], "fallback": False, "cache": False}, None, "no-such-flag"),
        (None, "max-autotune", "mode 'max-autotune' is not supported"),
    ],
)
def test_wrong_choices_are_named(options: Any, mode: str | None, match: str) -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda x: x * 13, backend=backend.register(), options=options, mode=mode)
    with pytest.raises(Exception, match=match):
        run(torch.randn(4))
