"""Divides a machine's cores or GPUs among its replicas."""

import os
from pathlib import Path
from typing import NamedTuple

from octavo.config import AUTO, Config, replace
from octavo.errors import ConfigError
from octavo.ipc.cores import usable_cores


class Share(NamedTuple):
    """What one replica gets."""

    cores: list[int]  # empty: not tied to any
    environment: dict[str, str]
    config: Config
    words: str  # for the log


def gpus(environment: dict[str, str] | None = None, devices: Path = Path("/dev")) -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    given = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() and name.strip() != "-1"]
    found = [path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*")]
    return sorted((name for name in found if name.isdigit()), key=int)


def share_of(config: Config, replica: int, num_replicas: int, gpu_names: list[str], cores: list[int]) -> Share:
    """The share of one of `num_replicas`. A replica beyond them shares with others: so it is when more are added later."""
    if config.model.device != "cpu" and gpu_names:
        return _gpu_share(config, replica, num_replicas, gpu_names)
    return _core_share(config, replica, num_replicas, cores)


def _gpu_share(config: Config, replica: int, num_replicas: int, names: list[str]) -> Share:
    """Whole GPUs for each replica where there are enough. Replicas of one rank may share one, and then its memory is divided."""
    size = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    if size > len(names):
        raise ConfigError(f"a replica has {size} ranks and needs {size} GPUs; there are {len(names)}")
    num_slots = len(names) // size
    if size > 1 and num_slots < num_replicas:
        raise ConfigError(
            f"--data-parallel-size {num_replicas} with {size} ranks each needs {num_replicas * size} GPUs; there are "
            f"{len(names)}"
        )
    slot = replica % num_slots
    mine = names[slot * size : (slot + 1) * size]
    sharing = -(-max(num_replicas - slot, 1) // num_slots)  # replicas of this slot
    words = f"GPU {', '.join(mine)}" if size == 1 else f"GPUs {', '.join(mine)}"
    if sharing > 1:
        utilization = config.cache.gpu_memory_utilization / sharing
        config = replace(config, gpu_memory_utilization=utilization)
        words += f", {utilization:.0%} of its memory"
    return Share([], {"CUDA_VISIBLE_DEVICES": ",".join(mine)}, config, words)


def _core_share(config: Config, replica: int, num_replicas: int, cores: list[int]) -> Share:
    """Cores of its own where there are enough, in order: neighbours share caches. Otherwise one core, which others have, too."""
    num_usable = min(usable_cores(), len(cores)) or 1
    num_threads = max(1, num_usable // num_replicas)
    if config.parallel.cpu_threads == AUTO:
        ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
        config = replace(config, cpu_threads=max(1, num_threads // ranks))
    if num_usable < len(cores):  # a quota, not the affinity, is the limit: the kernel moves threads as it likes
        return Share([], {}, config, f"{num_threads} of {num_usable} cores")
    if num_replicas >= len(cores):
        mine = [cores[replica % len(cores)]] if cores else []
    else:
        slot = replica % num_replicas
        mine = cores[slot * len(cores) // num_replicas : (slot + 1) * len(cores) // num_replicas]
    shared = num_replicas > len(cores) or replica >= num_replicas
    names = f"core {mine[0]}" if len(mine) == 1 else f"cores {_ranges(mine)}"
    return Share(mine, {}, config, f"{names}, shared with others" if shared else names)


def own_cores() -> list[int]:
    """The cores that this process may run on. Empty where the system does not say."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else []


def _ranges(numbers: list[int]) -> str:
    """0-3, 8: consecutive numbers as a range."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
