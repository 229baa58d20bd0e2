"""nvCOMP: what can be held without a GPU and without nvCOMP. The library is played by functions over host memory that
compress with the CPU's codecs; scripts/gpu_codecs.py runs the real one on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="frames on a GPU lie in torch tensors")

from deltackpt import arena, libnvcomp, nvcomp, trial  # noqa: E402 - after the check for torch
from deltackpt import codec as codecs  # noqa: E402
from deltackpt.errors import ConfigError, FormatError, IntegrityError, Poisoned  # noqa: E402
from deltackpt.libnvcomp import FORMATS, Library  # noqa: E402

CPU = torch.device("cpu")
PORTABLE = [codecs.LZ4, codecs.SNAPPY, codecs.DEFLATE, codecs.ZSTD]


def wheel() -> Path | None:
    return next((folder.parent for folder in libnvcomp._folders()), None)


needs_wheel = pytest.mark.skipif(wheel() is None, reason="nvCOMP is not installed; its licence keeps it out of CI")


# ---------------------------------------------------------------- the C interface


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (libnvcomp.AnsCompress, [("type", 0), ("data_type", 4), ("max_sub_chunk_count", 8), ("states_per_lane", 9),
                                 ("histogram_reduction_log2", 10), ("reserved", 11)]),
        (libnvcomp.AnsDecompress, [("backend", 0), ("data_type", 4), ("max_sub_chunk_count", 8), ("states_per_lane", 9),
                                   ("skip_validate", 10), ("reserved", 11)]),
        (libnvcomp.Lz4Compress, [("data_type", 0), ("bitshuffle_mode", 4), ("reserved", 8)]),
        (libnvcomp.Lz4Decompress, [("backend", 0), ("sort_before_hw_decompress", 4), ("data_type", 8),
                                   ("bitshuffle_mode", 12), ("reserved", 16)]),
        (libnvcomp.SnappyCompress, [("reserved", 0)]),
        (libnvcomp.SnappyDecompress, [("backend", 0), ("sort_before_hw_decompress", 4), ("reserved", 8)]),
        (libnvcomp.DeflateCompress, [("algorithm", 0), ("reserved", 4)]),
        (libnvcomp.DeflateDecompress, [("backend", 0), ("sort_before_hw_decompress", 4), ("reserved", 8)]),
        (libnvcomp.ZstdCompress, [("reserved", 0)]),
        (libnvcomp.ZstdDecompress, [("backend", 0), ("reserved", 4)]),
    ],
)  # fmt: skip
def test_options_are_64_bytes_with_the_fields_of_the_headers(
    options: type[ctypes.Structure], fields: list[tuple[str, int]]
) -> None:
    assert ctypes.sizeof(options) == 64
    assert [(name, getattr(options, name).offset) for name, _ in options._fields_] == fields


def test_options_say_the_backend_and_leave_the_rest_to_the_defaults() -> None:
    for codec, form in FORMATS.items():
        for backend in (nvcomp.HARDWARE, nvcomp.CUDA):
            kind = 0xFF if codec == codecs.ANS else 0
            expected = backend.to_bytes(4, "little") + kind.to_bytes(4, "little") + bytes(56)
            assert bytes(form.decompress_options(backend)) == expected
        algorithm = 1 if codec == codecs.DEFLATE else 0
        assert bytes(form.compress_options(nvcomp.MATCHES)) == algorithm.to_bytes(4, "little") + bytes(60)


@needs_wheel
def test_prototypes_are_those_of_the_headers() -> None:
    root = wheel()
    assert root is not None
    kinds = {"size_t": ctypes.c_size_t, "cudaStream_t": ctypes.c_void_p}
    for form in FORMATS.values():
        text = (root / "include" / "nvcomp" / f"{form.name.lower()}.h").read_text(encoding="utf-8")
        for call, arguments in libnvcomp.prototypes(form).items():
            found = re.search(rf"nvcompStatus_t nvcompBatched{form.name}{call}\((.*?)\);", text, re.DOTALL)
            assert found is not None, call
            expected = []
            for argument in found.group(1).split(","):
                words = argument.replace("const", "").split()
                options = {
                    f"nvcompBatched{form.name}CompressOpts_t": form.compress,
                    f"nvcompBatched{form.name}DecompressOpts_t": form.decompress,
                }
                expected.append(ctypes.c_void_p if "*" in argument else {**kinds, **options}[words[0]])
            assert list(arguments) == expected, f"{form.name}{call}"


@needs_wheel
def test_status_names_are_those_of_the_headers() -> None:
    root = wheel()
    assert root is not None
    text = (root / "include" / "nvcomp" / "shared_types.h").read_text(encoding="utf-8")
    body = text[text.index("enum nvcompStatus_t") : text.index("} nvcompStatus_t")]
    found = {int(n): name for name, n in re.findall(r"nvcomp(?:Error)?(\w+) = (\d+)", body)}
    assert found == libnvcomp.STATUS


@needs_wheel
def test_installed_library_answers_without_a_gpu_and_asks_for_no_more_than_16() -> None:
    library = libnvcomp.load()
    assert library.version.startswith("6.")
    found = {}
    for codec, form in FORMATS.items():
        compress, decompress = form.compress_options(nvcomp.ENTROPY), form.decompress_options(nvcomp.CUDA)
        found[codecs.NAMES[codec]] = (
            library.alignments(form, compress),
            library.alignments(form, decompress),
            library.ask(form, "CompressGetMaxOutputChunkSize", 1 << 16, compress, None),
        )
    assert found == {
        "ans": ((16, 16, 1), (16, 16, 1), 92720),
        "lz4": ((1, 1, 2), (1, 1, 1), 65800),
        "snappy": ((1, 1, 1), (1, 1, 1), 76490),
        "deflate": ((1, 8, 8), (4, 1, 1), 148256),
        "zstd": ((4, 1, 1), (1, 1, 8), 65547),
    }


@pytest.mark.parametrize(("number", "version"), [(5300, "5.3.0"), (7000, "7.0.0"), (5999, "5.9.99")])
def test_another_major_version_is_refused_by_name(number: int, version: str) -> None:
    with pytest.raises(ConfigError, match=rf"nvCOMP {version} found at x.so, 6 is expected; pip install"):
        Library(fake(number), "x.so")


def test_every_minor_version_of_the_major_is_admitted() -> None:
    assert Library(fake(6103), "x.so").version == "6.1.3"


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not libnvcomp.installed.__wrapped__()
    with pytest.raises(
        ConfigError, match=r"^libnvcomp.so.6 is expected, found: none; pip install 'deltackpt\[cuda13\]'"
    ):
        libnvcomp.load.__wrapped__()
    folder = tmp_path / "nvidia" / "libnvcomp" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libnvcomp.so.5").touch()
    assert libnvcomp.installed.__wrapped__()
    with pytest.raises(ConfigError, match=r"^libnvcomp.so.6 is expected, found: libnvcomp.so.5; "):
        libnvcomp.load.__wrapped__()


def test_library_of_the_wheel_goes_before_that_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path: fake())
    monkeypatch.setattr(sys, "path", ["", "nowhere", str(tmp_path)])
    assert libnvcomp.load.__wrapped__().path == "libnvcomp.so.6"
    path = tmp_path / "nvidia" / "libnvcomp" / "lib64" / "libnvcomp.so.6"
    path.parent.mkdir(parents=True)
    path.touch()
    assert libnvcomp.load.__wrapped__().path == str(path)


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (12, ConfigError, r"f: nvCOMP answers 12 \(CannotDecompress\); use another codec or backend"),
        (1000, Poisoned, r"f: nvCOMP answers 1000 \(CudaError\); the CUDA context is lost, restart the process"),
        (10000, Poisoned, r"\(Internal\)"),
        (77, ConfigError, r"77 \(unknown\)"),
    ],
)
def test_status_of_a_call_decides_what_to_do_next(status: int, error: type[Exception], words: str) -> None:
    libnvcomp.require(0, "f")
    with pytest.raises(error, match=words):
        libnvcomp.require(status, "f")


# ---------------------------------------------------------------- a library and a device played by the host


def sizes_at(address: int, n: int, kind: Any = ctypes.c_int64) -> np.ndarray:
    return np.ctypeslib.as_array((kind * n).from_address(address))


def fake(number: int = 6000, *, temp: int = 0, log: list[int] | None = None, status: int = 0, short: int = 0) -> Any:
    """nvCOMP's calls over host memory. temp: bytes wanted per frame; log: gets the frames of each call; status: of
    every frame, nothing is written for -1; short: bytes missing from each decoded frame."""
    library = SimpleNamespace()

    def properties(where: Any) -> int:
        where._obj.version = number
        return 0

    library.nvcompGetProperties = properties

    def calls(codec: int, name: str) -> None:
        def no_alignments(options: Any, where: int) -> int:
            return 0

        def most(nbytes: int, options: Any, where: int) -> int:
            sizes_at(where, 1)[0] = nbytes + nbytes // 6 + 100
            return 0

        def room(n: int, longest: int, options: Any, where: int, total: int, stream: int) -> int:
            sizes_at(where, 1)[0] = n * temp
            return 0

        def compress(
            raw: int, nbytes: int, longest: int, n: int, room: int, room_nbytes: int, out: int, out_nbytes: int,
            options: Any, statuses: int, stream: int,
        ) -> int:  # fmt: skip
            assert room_nbytes >= n * temp
            for i, (at, k, to) in enumerate(zip(sizes_at(raw, n), sizes_at(nbytes, n), sizes_at(out, n), strict=True)):
                stored = codecs._ENCODERS.get(codec, bytes)(ctypes.string_at(int(at), int(k)))
                ctypes.memmove(int(to), stored, len(stored))
                sizes_at(out_nbytes, n)[i] = len(stored)
            if status >= 0:
                sizes_at(statuses, n, ctypes.c_int32)[:] = status
            if log is not None:
                log.append(n)
            return 0

        def decompress(
            stored: int, nbytes: int, due: int, actual: int, n: int, room: int, room_nbytes: int, out: int,
            options: Any, statuses: int, stream: int,
        ) -> int:  # fmt: skip
            for i in range(n):
                at, k, m = (int(sizes_at(a, n)[i]) for a in (stored, nbytes, due))
                raw = bytes(codecs.decode(codec, ctypes.string_at(at, k), m))[: m - short]
                ctypes.memmove(int(sizes_at(out, n)[i]), raw, len(raw))
                sizes_at(actual, n)[i] = len(raw)
            if status >= 0:
                sizes_at(statuses, n, ctypes.c_int32)[:] = status
            if log is not None:
                log.append(n)
            return 0

        for call, function in (
            ("CompressGetRequiredAlignments", no_alignments), ("DecompressGetRequiredAlignments", no_alignments),
            ("CompressGetMaxOutputChunkSize", most), ("CompressGetTempSize", room), ("DecompressGetTempSize", room),
            ("CompressAsync", compress), ("DecompressAsync", decompress),
        ):  # fmt: skip
            # A function of its own for each name, since each gets its own prototype.
            setattr(library, f"nvcompBatched{name}{call}", lambda *a, f=function: f(*a))

    for codec, form in FORMATS.items():
        calls(codec, form.name)
    return library


class HostQueue(nvcomp.Queue):
    """A device that is the host and has always done everything already."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._torch, self.handle = device, torch, 0

    def current(self) -> Any:
        return contextlib.nullcontext()

    def upload(self, rows: Any, memory: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def download(self, memory: torch.Tensor) -> Any:
        return memory.clone(), SimpleNamespace(synchronize=lambda: None)

    def copy(self, source: torch.Tensor, target: torch.Tensor, nbytes: torch.Tensor) -> None:
        for a, b, n in zip(source.tolist(), target.tolist(), nbytes.tolist(), strict=True):
            assert a % 16 == b % 16 == 0
            ctypes.memmove(b, a, n)


@contextlib.contextmanager
def on_host(**options: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        library = Library(fake(**options), "fake")
        patch.setattr(nvcomp, "Queue", HostQueue)
        patch.setattr(nvcomp, "load", lambda: library)
        patch.setattr(trial, "load", lambda: library)
        yield


def table(*values: int) -> Any:
    return np.array(values, np.int64)


def laid_out(frames: list[bytes]) -> tuple[torch.Tensor, Any, Any]:
    """Frames in one tensor at multiples of 16; offsets and sizes."""
    nbytes = np.array([len(f) for f in frames], np.int64)
    offset = np.cumsum(-(-nbytes // 16) * 16) - -(-nbytes // 16) * 16
    memory = torch.zeros(int((-(-nbytes // 16) * 16).sum()) + 16, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    for at, frame in zip(offset.tolist(), frames, strict=True):
        memory[at : at + len(frame)] = torch.from_numpy(np.frombuffer(frame, np.uint8).copy())
    return memory, offset, nbytes


def content(nbytes: int, seed: int) -> bytes:
    """Bytes that shrink if seed is even and do not if it is odd."""
    if seed % 2 == 0:
        return bytes([seed % 256]) * nbytes
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


@settings(max_examples=20, derandomize=True, deadline=None)
@given(
    st.sampled_from(PORTABLE),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 99)), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_frames_come_back_whatever_their_sizes_and_batches(
    codec: int, shapes: list[tuple[int, int]], batch: int
) -> None:
    frames = [content(n, seed) for n, seed in shapes]
    raw, offset, nbytes = laid_out(frames)
    log: list[int] = []
    with on_host(log=log, temp=10), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvcomp, "_TEMP", 10 * batch)
        made = nvcomp.compress(codec, raw, offset, nbytes)
        assert max(log) <= batch
        assert sum(log) == len(frames)
        assert np.all(made.offset % 16 == 0)
        memory = made.memory.numpy().tobytes()
        for frame, at, k, kind in zip(frames, made.offset, made.nbytes, made.codec, strict=True):
            # As the CPU would have: the same choice between codec and raw.
            assert (int(kind), memory[at : at + k]) == tuple(map(_plain, codecs.encode(codec, frame)))
        gaps = np.ones(len(memory), bool)
        for at, k in zip(made.offset, made.nbytes, strict=True):
            gaps[at : at + k] = False
        assert not np.frombuffer(memory, np.uint8)[gaps].any()
        out = torch.zeros_like(raw)
        for kind in np.unique(made.codec).tolist():
            rows = made.codec == kind
            if kind == codecs.RAW:
                nvcomp.place(made.memory, made.offset[rows], out, offset[rows], nbytes[rows])
            else:
                nvcomp.decompress(
                    kind, made.memory, made.offset[rows], made.nbytes[rows], out, offset[rows], nbytes[rows]
                ).wait()
        assert torch.equal(out, raw)


def _plain(value: Any) -> Any:
    return value if isinstance(value, int) else bytes(value)


def test_pages_of_a_batch_stay_below_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[int] = []
    raw, offset, nbytes = laid_out([content(1000, 0)] * 10)
    # A page of the fake is 1000 + 166 + 100 bytes, 1280 when aligned.
    monkeypatch.setattr(nvcomp, "_PAGES", 4 * 1280)
    with on_host(log=log):
        nvcomp.compress(codecs.LZ4, raw, offset, nbytes)
    assert log == [4, 4, 2]


def test_a_frame_that_could_not_be_compressed_fails_all() -> None:
    raw, offset, nbytes = laid_out([content(1000, 0)] * 3)
    with (
        on_host(status=19),
        pytest.raises(IntegrityError, match=r"answers 19 \(CannotCompress\) for frame 0 and 2 others"),
    ):
        nvcomp.compress(codecs.ZSTD, raw, offset, nbytes)
    with on_host(status=-1), pytest.raises(IntegrityError, match="answers nothing for frame 0 and 2 others"):
        nvcomp.compress(codecs.ZSTD, raw, offset, nbytes)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"status": 12}, IntegrityError, r"lz4 frames by cuda: nvCOMP answers 12 \(CannotDecompress\) for frame 0"),
        ({"status": -1}, IntegrityError, "nvCOMP answers nothing for frame 0"),
        ({"short": 1}, FormatError, "frame 0 holds 999 bytes, 1000 are due"),
    ],
)
def test_a_decoder_that_reports_no_success_is_an_error_at_the_wait(
    options: dict[str, int], error: type[Exception], words: str
) -> None:
    stored, offset, nbytes = laid_out([bytes(codecs.encode(codecs.LZ4, content(1000, 0))[1])])
    out, places, due = laid_out([bytes(1000)])
    with on_host(**options):
        check = nvcomp.decompress(codecs.LZ4, stored, offset, nbytes, out, places, due)
        with pytest.raises(error, match=words):
            check.wait()


def test_an_error_of_the_device_is_poisoned_at_the_wait_and_other_errors_are_not() -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")

    def bug() -> None:
        raise RuntimeError("expected a tensor")

    def check(synchronize: Any) -> nvcomp.Check:
        event: Any = SimpleNamespace(synchronize=synchronize)
        return nvcomp.Check("zstd frames", table(1), torch.zeros(2, 1), event, ())

    with pytest.raises(
        Poisoned, match=r"^zstd frames: CUDA error: an illegal memory access was encountered; .*restart"
    ):
        check(lost).wait()
    with pytest.raises(RuntimeError, match="expected a tensor"):
        check(bug).wait()


@pytest.mark.parametrize(
    ("offset", "nbytes", "error", "words"),
    [
        ((0, 16), (16, 0), FormatError, "frame 1 of 0 bytes"),
        ((0, 64), (16, 1), FormatError, "frame 1 of 1 bytes at 64 does not lie in 64 bytes"),
        ((0, 48), (16, 17), FormatError, "frame 1 of 17 bytes"),
        ((-16, 0), (16, 16), FormatError, "frame 0 of 16 bytes at -16"),
        ((0, 1 << 62), (16, 16), FormatError, "frame 1"),
        ((0, 16), (16, (1 << 63) - 1), FormatError, "longer than 16777216"),
        ((0, 8), (8, 8), ConfigError, "frame 1 begins at address .*; lay frames out at multiples of 16"),
        ((0,), (16, 16), ConfigError, "1 offsets and 2 sizes"),
    ],
)
def test_rows_that_leave_memory_or_lie_askew_reach_no_decoder(
    offset: tuple[int, ...], nbytes: tuple[int, ...], error: type[Exception], words: str
) -> None:
    memory = laid_out([bytes(48)])[0][:64]
    ours, places, due = laid_out([bytes(16)] * len(offset))
    with on_host():
        with pytest.raises(error, match=words):
            nvcomp.decompress(codecs.LZ4, memory, table(*offset), table(*nbytes), ours, places, due)
        with pytest.raises(error, match=words):
            nvcomp.place(ours, places, memory, table(*offset), table(*nbytes))
        with pytest.raises(error, match=words):
            nvcomp.compress(codecs.LZ4, memory, table(*offset), table(*nbytes))


def test_places_of_two_frames_never_overlap() -> None:
    stored, offset, nbytes = laid_out([bytes(codecs.encode(codecs.LZ4, bytes(100))[1])] * 2)
    out = laid_out([bytes(300)])[0]
    with on_host(), pytest.raises(FormatError, match="two frames overlap"):
        nvcomp.decompress(codecs.LZ4, stored, offset, nbytes, out, table(96, 0), table(100, 100))


def test_other_codecs_and_other_memory_are_refused() -> None:
    memory, offset, nbytes = laid_out([bytes(64)])
    with on_host():
        with pytest.raises(ConfigError, match=r"codec 0 \(raw\) is not one of nvCOMP's"):
            nvcomp.compress(codecs.RAW, memory, offset, nbytes)
        with pytest.raises(ConfigError, match="contiguous bytes are expected"):
            nvcomp.compress(codecs.LZ4, memory.view(torch.int16), offset, nbytes)
        with pytest.raises(ConfigError, match="2 frames for 1 places"):
            nvcomp.decompress(codecs.LZ4, memory, table(0, 16), table(1, 1), memory, offset, nbytes)


# ---------------------------------------------------------------- the Decompression Engine


def test_mask_of_the_driver_says_which_codecs_an_engine_reads() -> None:
    assert arena.Capability(0, 0).codecs == ()
    assert arena.Capability(0b001, 1).codecs == ("deflate",)
    assert arena.Capability(0b010, 1).codecs == ("snappy",)
    assert arena.Capability(0b111, 1).codecs == ("deflate", "lz4", "snappy")
    assert not arena.Capability(0b111, 1).reads(codecs.ZSTD)
    assert not arena.Capability(0b111, 1).reads(codecs.ANS)


@pytest.mark.parametrize(
    ("mask", "limit", "is_capable", "words"),
    [
        (
            0,
            0,
            True,
            r"^no Decompression Engine of cpu reads lz4: the driver reports mask 0x0 \(nothing\); use backend",
        ),
        (0b011, 1 << 22, True, r"the driver reports mask 0x3 \(deflate, snappy\)"),
        (0b100, 999, True, "a lz4 frame of 1000 bytes, the Decompression Engine of cpu takes at most 999"),
        (0b100, 1 << 22, False, r"is not capable of hardware decompression \(pointer attribute 21 is 0\)"),
    ],
)
def test_hardware_is_refused_before_the_call_where_the_driver_does_not_promise_it(
    monkeypatch: pytest.MonkeyPatch, mask: int, limit: int, is_capable: bool, words: str
) -> None:
    monkeypatch.setattr(arena, "capability", lambda device: arena.Capability(mask, limit))
    monkeypatch.setattr(arena, "capable", lambda memory, device: is_capable)
    log: list[int] = []
    stored, offset, nbytes = laid_out([bytes(codecs.encode(codecs.LZ4, bytes(1000))[1])])
    out, places, due = laid_out([bytes(1000)])
    with on_host(log=log), pytest.raises(ConfigError, match=words):
        nvcomp.decompress(codecs.LZ4, stored, offset, nbytes, out, places, due, backend=nvcomp.HARDWARE)
    assert log == []


def test_scratch_of_the_size_that_was_named_is_enough_and_one_byte_less_is_not() -> None:
    frames = [content(n, 2) for n in (200, 3000, 50)]
    stored, offset, nbytes = laid_out([bytes(codecs.encode(codecs.ZSTD, f)[1]) for f in frames])
    out, places, due = laid_out([bytes(len(f)) for f in frames])
    with on_host(temp=1000):
        size = nvcomp.scratch_nbytes(codecs.ZSTD, due, CPU)
        # Tables of 96, 24, 12 and 48 bytes, 256 for each, and 3000 for the decoder, all at multiples of 256.
        assert size == 4 * 256 + 3072
        scratch = torch.empty(size, dtype=torch.uint8)
        nvcomp.decompress(codecs.ZSTD, stored, offset, nbytes, out, places, due, scratch=scratch).wait()
        assert [out[a : a + n].numpy().tobytes() for a, n in zip(places, due, strict=True)] == frames
        with pytest.raises(ConfigError, match="scratch of 4095 bytes, at least 4096 are needed"):
            nvcomp.decompress(codecs.ZSTD, stored, offset, nbytes, out, places, due, scratch=scratch[:-1])


@pytest.mark.parametrize("backend", [nvcomp.HARDWARE, nvcomp.CUDA])
def test_a_trial_shows_what_the_driver_says_and_what_came_out_right(
    monkeypatch: pytest.MonkeyPatch, backend: int
) -> None:
    monkeypatch.setattr(arena, "capability", lambda device: arena.Capability(0b101, 1 << 22))
    monkeypatch.setattr(arena, "capable", lambda memory, device: True)
    for name in ("host_memory", "device_memory"):
        monkeypatch.setattr(arena, name, lambda n, device: torch.zeros(n, dtype=torch.uint8))
    with on_host():
        found = trial.probe(CPU, backend=backend)
    names = {nvcomp.HARDWARE: ("deflate", "lz4"), nvcomp.CUDA: ("deflate", "lz4", "snappy")}[backend]
    assert (found.mask, found.limit, found.nvcomp, found.codecs) == (5, 4194304, "6.0.0", names)
    assert found.backend == {nvcomp.HARDWARE: "hardware", nvcomp.CUDA: "cuda"}[backend]
    assert (found.frames, found.raw) == (8 * len(names), 8 * len(names) * 262144)
    assert 0 < found.stored < found.raw


def test_a_trial_of_an_engine_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "capability", lambda device: arena.Capability(0, 0))
    with on_host(), pytest.raises(ConfigError, match="the driver reports mask 0x0"):
        trial.probe(CPU, backend=nvcomp.HARDWARE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_driver_an_arena_is_refused_in_one_line() -> None:
    device = torch.device("cuda", 0)
    for ask in (lambda: arena.capability(device), lambda: arena.host_memory(1, device)):
        with pytest.raises(ConfigError, match=r"no CUDA driver|the CUDA driver cannot be asked"):
            ask()


class Driver:
    """The calls of CUDA's driver that arenas make, over memory of the host. refuse: the call that fails."""

    def __init__(self, refuse: str = "", *, numa: int = 1, is_capable: int = 1) -> None:
        self.calls: list[str] = []
        self.memory = (ctypes.c_uint8 * 8192)()
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=0)
        self.CUdevice_attribute = self.CUpointer_attribute = int
        # Any name of an enumeration is its own value.
        named = type("Named", (), {"__getattr__": lambda _, name: name})()
        self.CUmemAllocationType = self.CUmemLocationType = self.CUmemAccess_flags = named
        self.CUmemAllocationGranularity_flags = named
        attributes = {136: 0b111, 137: 1 << 22, 134: -1, 141: numa}
        address = ctypes.addressof(self.memory)
        answers = {
            "cuInit": (), "cuDevicePrimaryCtxRetain": ("context",), "cuCtxPushCurrent": (), "cuCtxPopCurrent": (),
            "cuMemGetAllocationGranularity": (4096,), "cuMemCreate": ("handle",), "cuMemAddressReserve": (address,),
            "cuMemMap": (), "cuMemSetAccess": (), "cuMemUnmap": (), "cuMemAddressFree": (), "cuMemRelease": (),
        }  # fmt: skip

        def call(name: str, *arguments: Any) -> tuple[Any, ...]:
            if not name.startswith("cuCtx"):
                self.calls.append(name)
            if name == "cuMemSetAccess":
                self.access = [(a.location.type, a.flags) for a in arguments[2]]
            return (SimpleNamespace(name="CUDA_ERROR_X"),) if name == refuse else (0, *answers[name])

        for name in answers:
            setattr(self, name, lambda *a, n=name: call(n, *a))
        self.cuDeviceGetAttribute = lambda number, device: (0, attributes[number])
        self.cuPointerGetAttribute = lambda number, pointer: (0, is_capable)

    def CUmemAllocationProp(self) -> Any:
        self.place = SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())
        return self.place

    def CUmemAccessDesc(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())


@pytest.fixture(autouse=True)
def _no_context_is_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(arena, "_pointer_attribute", lambda n, at: arena._driver().cuPointerGetAttribute(n, at))
    yield
    arena._context.cache_clear()


DEVICE = torch.device("cuda", 0)
MAPPED = ["cuInit", "cuDevicePrimaryCtxRetain", "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve",
          "cuMemMap", "cuMemSetAccess"]  # fmt: skip


def test_host_arena_is_given_back_in_reverse_with_the_last_that_looks_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(arena, "_driver", lambda: driver)
    assert arena.capability(DEVICE) == arena.Capability(7, 4194304)
    memory = arena.host_memory(5000, DEVICE)
    assert len(memory) == 5000
    assert memory.data_ptr() == ctypes.addressof(driver.memory)
    assert driver.place.allocFlags.usage == 2
    assert (driver.place.location.type, driver.place.location.id) == ("CU_MEM_LOCATION_TYPE_HOST_NUMA", 0)
    assert driver.access == [
        ("CU_MEM_LOCATION_TYPE_HOST_NUMA", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"),
        ("CU_MEM_LOCATION_TYPE_DEVICE", "CU_MEM_ACCESS_FLAGS_PROT_READ"),
    ]
    view = memory[100:200].numpy()
    del memory
    view[0] = 7
    assert driver.memory[100] == 7
    assert driver.calls == MAPPED
    del view
    assert driver.calls == [*MAPPED, "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


@pytest.mark.parametrize(
    ("refuse", "undone"),
    [
        ("cuMemCreate", []),
        ("cuMemAddressReserve", ["cuMemRelease"]),
        ("cuMemMap", ["cuMemAddressFree", "cuMemRelease"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]),
    ],
)
def test_host_arena_that_fails_half_way_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, refuse: str, undone: list[str]
) -> None:
    driver = Driver(refuse)
    monkeypatch.setattr(arena, "_driver", lambda: driver)
    with pytest.raises(
        ConfigError, match="5000 bytes of host arena for cuda:0: the CUDA driver answers CUDA_ERROR_X; "
    ):
        arena.host_memory(5000, DEVICE)
    assert driver.calls == [*MAPPED[: MAPPED.index(refuse) + 1], *undone]


def test_host_arena_that_the_engine_cannot_reach_is_refused_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(is_capable=0)
    monkeypatch.setattr(arena, "_driver", lambda: driver)
    with pytest.raises(ConfigError, match="is not capable of it: pointer attribute 21 is 0") as caught:
        arena.host_memory(5000, DEVICE)
    del caught
    gc.collect()
    assert driver.calls == [*MAPPED, "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


def test_a_device_that_maps_no_host_memory_has_no_host_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_driver", lambda: Driver(numa=0))
    with pytest.raises(ConfigError, match=r"cuda:0 maps no memory of the host's nodes \(attribute 141 is 0\)"):
        arena.host_memory(1, DEVICE)
