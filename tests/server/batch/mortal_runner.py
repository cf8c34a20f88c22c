"""API processes without a socket, over a scripted engine, one after another: each runs the batches in a folder until all have ended.
It kills itself when a request's prompt holds DEADLY, and when a file that begins with DEADLY_FILE is validated. Then the next begins.

`python -m tests.server.batch.mortal_runner FOLDER MOST_DEATHS` prints how many were killed when all batches have ended."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from octavo.server.app import build_app
from octavo.server.batch import crash_memory, runner
from octavo.server.batch.batches import BatchStore
from tests.doubles import ScriptedEngine, byte_text, config, says

DEADLY = "deadly"
DEADLY_FILE = b'{"deadly file'


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def run(folder: Path) -> None:
    crash_memory.CONTROL_SECONDS = 0.0
    engine = ScriptedEngine(says("hello"))

    def watch(request, step):
        if step == 3 and DEADLY in bytes(request.prompt_ids).decode():
            die()

    engine.on_step = watch
    validate = runner._Run._validate

    def mortal_validate(self):
        with self._open_input() as file:
            if file.read(len(DEADLY_FILE)) == DEADLY_FILE:
                die()
        return validate(self)

    runner._Run._validate = mortal_validate  # type: ignore[method-assign]
    app = build_app(engine, byte_text(), config(files_folder=str(folder), batch_concurrency=4), "byte-model")
    running = asyncio.create_task(app.state.service.run_background())
    store = BatchStore(folder)
    while store.unfinished():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait({running})
    engine.close()


def main(folder: Path, most_deaths: int) -> None:
    for number in range(most_deaths + 1):
        child = os.fork()  # there is no other thread yet
        if not child:
            asyncio.run(run(folder))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            print(number)
            return
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    sys.exit(f"{most_deaths + 1} processes were killed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
