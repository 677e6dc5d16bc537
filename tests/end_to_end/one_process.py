"""`benchmarks.one_process` as the services of the nursery are: without kernels, and with small steps prepared."""

from benchmarks.one_process import load
from benchmarks.peers import serve
from tandem.engine.core import engine, selection
from tests.end_to_end.processes import WARM_UP_SECONDS

if __name__ == "__main__":
    engine.WARM_UP_SECONDS = WARM_UP_SECONDS
    vars(selection)["load_native"] = lambda *_: None
    serve(load)
