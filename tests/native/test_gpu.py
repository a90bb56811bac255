"""Properties that only a GPU shows: stream order, graph captures, devices, pinned memory."""

from __future__ import annotations

import threading

import pytest
import torch

from pdstore.errors import Direction, LayoutError, Reason, SwapError
from pdstore.format.block import HEADER_BYTES
from pdstore.format.identity import LayerSpec
from pdstore.native.library import CopyPath, address_of
from pdstore.store import open_store
from pdstore.store.memory import MemoryStore
from pdstore.worker.swap import open_swap
from pdstore.worker.swap.base import TorchSwap
from pdstore.worker.swap.native import DEFAULT_STREAM, NativeSwap
from pdstore.worker.transfer.staging import Staging
from tests.support import kv, native_kit
from tests.support.arena_kit import place_of
from tests.support.gpu_kit import gpu_instance, rig, spin
from tests.support.swap_case import POISON, Case, host_memory, layout_of, view_of

pytestmark = [pytest.mark.cuda, native_kit.needs_gpu]

PATHS = [CopyPath.BATCH, CopyPath.STRIDED, CopyPath.STAGE]


def stream_handle(stream) -> int:
    return stream.cuda_stream or DEFAULT_STREAM


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("own_stream", [True, False])
def test_a_save_reads_after_what_the_stream_had_queued(library, path, own_stream):
    case, swap, host, copies = rig(library, path)
    want = host.clone()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        spin(30)
        case.buffer.copy_(torch.randint_like(case.buffer, 256))
        ticket = swap.start(Direction.SAVE, copies, stream=stream_handle(stream))
    assert not ticket.wait(0) or stream.query()
    assert ticket.wait(30)
    assert stream.query()
    TorchSwap(case.layout, case.caches).gather(
        case.copies([p.block_ids for p in copies], 32, view_of(want))
    )
    assert torch.equal(host, want)


@pytest.mark.parametrize("path", PATHS)
def test_a_load_writes_after_what_the_event_says(library, path):
    case, swap, _host, copies = rig(library, path)
    swap.gather(copies)
    want = case.buffer.clone()
    event = torch.cuda.Event()
    spin(30)
    case.buffer.zero_()
    event.record()
    ticket = swap.start(Direction.LOAD, copies, ready=event.cuda_event)
    assert not ticket.wait(0) or event.query()
    assert ticket.wait(30)
    assert event.query()
    assert torch.equal(case.buffer, want)


@pytest.mark.requirement(
    "R-PIN-4, R-CAP-1, 2", "no pinning and no default-mode call while a graph is captured"
)
def test_twenty_graphs_are_captured_while_saves_and_loads_run(library):
    store = MemoryStore()
    instance = gpu_instance(store)
    keys = instance.cache.keys(list(range(2000)))
    ids = list(range(-(-2000 // 16)))
    stop, errors = threading.Event(), []

    def work():
        try:
            while not stop.is_set():
                store.remove(keys.store_keys(instance.layout.owned_parts, 0))
                saved = instance.pool.save(keys, ids).wait(20)
                loaded = instance.pool.load(keys, ids).wait(20)
                assert saved.num_tokens == loaded.num_tokens == 2000
        except Exception as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    x = torch.randn(512, 512, device="cuda")
    torch.tanh(x @ x)
    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            y = x
            for _ in range(20):
                y = torch.tanh(y @ x)
        graph.replay()
        torch.cuda.synchronize()
    stop.set()
    thread.join(60)
    assert not errors
    instance.close()


@pytest.mark.parametrize("engine_block_tokens", [16, 64])
def test_the_pool_saves_and_loads_gpu_tensors(library, engine_block_tokens):
    store = MemoryStore()
    p = gpu_instance(store, engine_block_tokens=engine_block_tokens)
    d = gpu_instance(store, engine_block_tokens=engine_block_tokens)
    swap = open_swap(p.settings, p.layout, p.caches)
    assert isinstance(swap, NativeSwap)
    swap.close()
    keys = p.cache.keys(list(range(333)))
    count = -(-333 // engine_block_tokens)
    for cache in d.caches:
        cache.fill_(-7)
    ids_p, ids_d = list(range(3, 3 + count)), list(range(100, 100 + count))
    assert p.pool.save(keys, ids_p).wait(20).num_tokens == 333
    first = engine_block_tokens * 2
    assert d.pool.load(keys, ids_d, first_token=first).wait(20).num_tokens == 333
    for layer in range(len(p.caches)):
        got, want = d.tokens(ids_d, layer), p.tokens(ids_p, layer)
        assert torch.equal(got[first:333], want[first:333])
        assert (got[:first] == -7).all()
        assert (got[333:] == -7).all()
    p.close()
    d.close()


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16)])
def test_tables_with_block_sizes_of_their_own_move_in_place(library, memory_path, sizes):
    """D's tables have other sizes than P's; both sum on the device what they copied."""
    url = f"shm://test?size=64MiB&dir={memory_path}"  # a process registers a mapping once
    arenas = [open_store(url, kv.settings_of()) for _ in "pd"]
    layers = [LayerSpec(2, 64), LayerSpec(2, 64, table=1)]
    p, d = (
        gpu_instance(arena, layers=layers, engine_block_tokens=each)
        for arena, each in zip(arenas, [sizes, (32, 32)], strict=True)
    )
    keys = p.cache.keys(list(range(333)))
    ids = [range(100, 100 + -(-333 // size)) for size in sizes]
    assert p.pool.save(keys, ids).wait(20).num_tokens == 333
    assert d.pool.load(keys, [range(11), range(11, 22)]).wait(20).num_tokens == 333
    for layer, d_ids in enumerate([range(11), range(11, 22)]):
        got, want = d.tokens(d_ids, layer), p.tokens(ids[layer], layer)
        assert torch.equal(got[:333], want[:333])
    p.close()
    d.close()
    for arena in arenas:
        arena.close()


@pytest.mark.requirement("R-AR-7", "streams belong to an instance")
@pytest.mark.parametrize("path", PATHS)
def test_threads_on_streams_of_their_own_save_and_load_what_each_queued(library, path):
    """No scratch, order or event is shared between streams."""
    case, swap, _host, _pieces = rig(library, path)
    errors = []

    def work(number):
        stream = torch.cuda.Stream()
        generator = torch.Generator(device="cuda").manual_seed(number)
        ids = torch.arange(8 * number, 8 * number + 8, device="cuda")
        host = host_memory(case.host_bytes(4), "cuda")
        swap.add_host(address_of(view_of(host)), len(host))
        copies = case.copies(ids.view(4, 2).tolist(), 32, view_of(host))
        with torch.cuda.stream(stream):
            for _ in range(10):
                want = []
                spin(1 + number % 3)
                for cache in case.caches:
                    new = torch.randn(8, *cache.shape[1:], device="cuda", generator=generator)
                    want.append(new.to(cache.dtype))
                    cache[ids] = want[-1]
                saved = swap.start(Direction.SAVE, copies, stream=stream_handle(stream))
                assert saved.wait(30)
                for cache in case.caches:
                    spin(0.3)
                    cache[ids] = 0
                loaded = swap.start(Direction.LOAD, copies, stream=stream_handle(stream))
                assert loaded.wait(30)
                if not all(
                    torch.equal(cache[ids], new)
                    for cache, new in zip(case.caches, want, strict=True)
                ):
                    errors.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    swap.close()


def test_a_call_under_capture_is_refused(library):
    _case, swap, _host, copies = rig(library)
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        stream = torch.cuda.current_stream()
        with pytest.raises(SwapError, match="captured"):
            swap.start(Direction.SAVE, copies, stream=stream_handle(stream))
    graph.replay()
    swap.gather(copies)


def test_host_memory_that_is_not_registered_is_refused(library):
    _case, swap, _host, copies = rig(library)
    payload = memoryview(bytearray(len(copies[0].payload)))
    with pytest.raises(LayoutError, match="registered"):
        swap.gather([copies[0]._replace(payload=payload)])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("odd", [0, 3])
def test_layers_more_than_2_gib_apart_are_copied_right(library, path, odd):
    layout = layout_of(
        dtype="uint8",
        rope="",
        layers=(LayerSpec.latent(65536),) * 3,
        block_tokens=1,
        engine_block_tokens=1,
    )
    step, size = (5 << 29) + odd, 64 * 65536
    flat = torch.zeros(2 * step + size, dtype=torch.uint8, device="cuda")
    caches = [flat[n * step :][:size].view(64, 1, 1, 65536) for n in range(3)]
    for cache in caches:
        cache.random_()
    torch.cuda.synchronize()
    swap = NativeSwap(library, layout, caches, path=path)
    case = Case(layout, 64, flat, caches)
    host = host_memory(case.host_bytes(64), "cuda")
    swap.add_host(address_of(view_of(host)), len(host))
    copies = case.copies([[(7 * i) % 64] for i in range(64)], 1, view_of(host))
    swap.gather(copies)
    want = torch.full_like(host, POISON)
    TorchSwap(layout, caches).gather(case.copies([p.block_ids for p in copies], 1, view_of(want)))
    assert torch.equal(host, want)
    before = [c.clone() for c in caches]
    for cache in caches:
        cache.zero_()
    torch.cuda.synchronize()
    swap.scatter(copies)
    assert all(torch.equal(a, b) for a, b in zip(before, caches, strict=True))
    between = [flat[n * step + size : (n + 1) * step] for n in range(2)]
    assert not any(gap.any() for gap in between)


@pytest.mark.requirement("R-PIN-9", "memory is registered in pieces")
def test_staging_is_pinned_in_pieces_and_every_slot_can_be_copied(library):
    case, swap, host, _ = rig(library)
    store = MemoryStore()
    payload = case.layout.geometry.largest_payload_bytes
    staging = Staging(store.allocate, payload, 64 << 20, swap.registrar, span_bytes=1 << 20)
    staging.memory.ready(60)
    part, step = case.layout.parts[0], staging.slot_bytes
    for slot in range(staging.num_slots):
        payload_view = staging.view[slot * step + 64 :][:payload]
        piece = case.copies([[1, 2]], 32, view_of(host))[0]._replace(payload=payload_view)
        assert piece.part == part
        swap.gather([piece])
    swap.close()
    staging.memory.close()


@pytest.mark.requirement("R-PIN-8", "a failure leaves no error behind for the next call")
def test_what_cannot_be_pinned_is_an_error_and_leaves_no_error_behind(library):
    _, swap, _, _ = rig(library)
    with pytest.raises(SwapError, match="cudaHostRegister"):
        swap.register(1 << 46, 1 << 20)
    assert torch.zeros(1, device="cuda").item() == 0


def test_a_value_of_an_arena_that_is_damaged_is_found_where_it_was_copied_to(library, memory_path):
    """Values that were right before it count."""
    url = f"shm://test?size=64MiB&dir={memory_path}"  # a process registers a mapping once
    arenas = [open_store(url, kv.settings_of()) for _ in "pd"]
    p, d = (gpu_instance(arena, engine_block_tokens=16) for arena in arenas)
    arena = arenas[1]
    keys, ids = p.cache.keys(list(range(333))), list(range(30, 51))
    assert p.pool.save(keys, ids).wait(20).num_tokens == 333
    assert d.pool.load(keys, ids).wait(20).num_tokens == 333
    for mine, theirs in zip(p.caches, d.caches, strict=True):
        assert torch.equal(mine[ids].flatten(0, 1)[:333], theirs[ids].flatten(0, 1)[:333])
    key = keys.store_keys(p.layout.owned_parts)[2]
    value = place_of(arena, key, HEADER_BYTES + kv.BLOCK_BYTES)
    value[1000] ^= 1
    result = d.pool.load(keys, ids).wait(20)
    assert (result.num_tokens, result.reason) == (128, Reason.CORRUPT)
    assert arena.match([key]) == 0
    p.close()
    d.close()
    for arena in arenas:
        arena.close()
