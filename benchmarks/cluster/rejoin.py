"""How long a new API process takes to know the pages of all replicas: a real client of a fleet, over real sockets, and
replicas that answer its Hello with their snapshots."""

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time

import msgspec
import numpy as np
import zmq

from benchmarks.front_engine import TimedSteps
from octavo.client.fleet import FleetClient
from octavo.config import FleetConfig
from octavo.ipc.heartbeat import shared_memory
from octavo.ipc.launch import ReplicaAddress
from octavo.messages import Hello, PageSnapshot, ReplicaLoad, ToEngine

NAME = "rejoin"
MOST_SECONDS = 1.0
SECRET = bytes(32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pages", type=int, default=10_000_000)
    parser.add_argument("--replicas", type=int, default=100)


def serve(folder: str, num_replicas: int, each: int, is_ready) -> None:
    """All replicas in one process: each sends its report and its snapshot to who says Hello."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 4 * num_replicas + 64)
    encode, decoder = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(ToEngine)
    rng, poller = np.random.default_rng(0), zmq.Poller()
    report = TimedSteps(64, 0.0).start()
    messages = {}
    for number in range(num_replicas):
        socket = context.socket(zmq.PULL)
        socket.bind(f"ipc://{folder}/engine-{number + 1}")
        poller.register(socket, zmq.POLLIN)
        pages = rng.integers(1, 2**64, each, np.uint64).tobytes()
        own = msgspec.structs.replace(report, replica=number, epoch=number + 1)
        messages[socket] = [encode(own), encode(PageSnapshot(number, number + 1, 5, pages, ReplicaLoad()))]
    is_ready.set()
    while True:
        for socket, _ in poller.poll():
            hello = decoder.decode(socket.recv())
            if isinstance(hello, Hello):
                reply = context.socket(zmq.PUSH)
                reply.connect(hello.reply_to)
                for message in messages[socket]:
                    reply.send(message)


async def measure(folder: str, num_replicas: int, num_pages: int) -> tuple[float, float]:
    """Seconds until the index is complete, and CPU seconds of this process until then."""
    addresses = [
        ReplicaAddress(number, number + 1, f"ipc://{folder}/engine-{number + 1}", f"ipc://{folder}/api-{number + 1}")
        for number in range(num_replicas)
    ]
    config = FleetConfig(data_parallel_size=num_replicas)
    fd = shared_memory(num_replicas)
    began, began_cpu = time.perf_counter(), time.process_time()
    client = FleetClient(config, addresses, SECRET, 0, f"ipc://{folder}/notices", fd, (0, 0), 1, lambda message: None)
    try:
        await client.ready()
        while len(client._router.index) < num_pages or client._router.index.incomplete:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return time.perf_counter() - began, time.process_time() - began_cpu
    finally:
        client.close()


def run(arguments: argparse.Namespace) -> None:
    each = arguments.pages // arguments.replicas
    with tempfile.TemporaryDirectory(prefix="octavo-rejoin-") as folder:
        context = multiprocessing.get_context("spawn")
        is_ready = context.Event()
        engines = context.Process(target=serve, args=(folder, arguments.replicas, each, is_ready), daemon=True)
        engines.start()
        is_ready.wait()
        seconds, spent = asyncio.run(measure(folder, arguments.replicas, each * arguments.replicas))
        engines.kill()
        engines.join()
    print(
        f"{each * arguments.replicas:,} pages of {arguments.replicas} replicas, {each * 8 * arguments.replicas / 1e6:.0f} MB of snapshots"
    )
    print(f"complete after {seconds:.2f} s, {spent:.2f} s CPU")
    if seconds > MOST_SECONDS:
        sys.exit(f"FAILED: more than {MOST_SECONDS:g} s")
