"""Times how weights get from safetensors files to the device: mapped and copied, against read ahead through a ring.
The file is made up: one layer's worth of an 8B model, many times over.

    python -m benchmarks.load_weights [GB] [folder]     # 4 GB, in the folder for temporary files
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo.device import pick
from octavo.weights.formats.safetensors_files import SafetensorsFiles
from octavo.weights.pinned_reader import read_ahead

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4096,), (4096,)]
Tensors = Iterator[tuple[str, torch.Tensor]]


def write(folder: Path, num_bytes: int) -> list[Path]:
    layer_bytes = 2 * sum(torch.Size(shape).numel() for shape in SHAPES)
    paths = []
    for number in range(max(1, num_bytes // layer_bytes)):
        values = torch.arange(number, number + 65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        tensors = {
            f"layer.{number}.{i}": values.repeat(-(-torch.Size(shape).numel() // 65536))[: torch.Size(shape).numel()]
            .view(shape)
            .contiguous()
            for i, shape in enumerate(SHAPES)
        }
        paths.append(folder / f"model-{number:05}.safetensors")
        save_file(tensors, paths[-1])
    (folder / "config.json").write_text("{}")
    return paths


def main(gigabytes: float, parent: str | None) -> None:
    device = pick()
    with tempfile.TemporaryDirectory(dir=parent) as name:
        paths = write(Path(name), int(gigabytes * 1e9))
        files = SafetensorsFiles(Path(name))
        regions = files.regions()
        print(
            f"{device.describe(torch.get_num_threads())}: {files.num_bytes / 1e9:.1f} GB in {len(paths)} files, read before: from memory"
        )

        def mapped() -> Tensors:
            return ((name, tensor.to(device.torch_device)) for name, tensor in files.stored("cpu"))

        wanted = {name: _bits(tensor).sum().item() for name, tensor in mapped()}
        got = {name: _bits(tensor).sum().item() for name, tensor in read_ahead(regions, device)}
        assert got == wanted, "the two ways differ"
        report("mapped, then .to(device)", mapped, files.num_bytes, device.synchronize)
        for chunk in (8, 32, 128):
            for readers in (1, 2, 4, 8):

                def ahead(chunk: int = chunk, readers: int = readers) -> Tensors:
                    return read_ahead(regions, device, chunk << 20, readers)

                report(f"ring: {readers} readers, chunks of {chunk} MiB", ahead, files.num_bytes, device.synchronize)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16).to(torch.int64)


def report(name: str, tensors: Callable[[], Tensors], num_bytes: int, synchronize: Callable[[], None]) -> None:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        for _, tensor in tensors():
            del tensor
        synchronize()
        times.append(time.perf_counter() - started)
    best = sorted(times)[1]
    print(f"{name:40} {best:6.2f} s  {num_bytes / best / 1e9:5.1f} GB/s")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0, sys.argv[2] if len(sys.argv) > 2 else None)
