"""The loop: it drains, stops, can be entered again, keeps two steps in flight, and hands its failure to the caller."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, Sampled, next_token

from specgen.engine.client import EngineClient
from specgen.engine.core import Abort, Add, EngineCore, Stop
from specgen.engine.executor import UniProcExecutor
from specgen.engine.kv_blocks import KVBlockManager
from specgen.engine.request import EngineOutput, EngineRequest
from specgen.engine.scheduler import Scheduler, SchedulerConfig
from specgen.engine.step import ModelRunnerOutput, SchedulerOutput
from specgen.errors import EngineError
from specgen.sampling_params import SamplingParams

K = 3
SECONDS = 20.0  # no wait of a healthy loop is as long


class Device(FakeDevice):
    """Notes the order of calls; raises at step `fails_at[1]` in the call `fails_at[0]`."""

    def __init__(self, kv: KVBlockManager, k: int = K, fails_at: tuple[str, int] | None = None) -> None:
        super().__init__(kv, k, acceptance=0.5, seed=0)
        self.calls: list[tuple[str, int]] = []
        self.fails_at = fails_at
        self.num_shutdowns = 0

    def note(self, call: str, step: int) -> None:
        self.calls.append((call, step))
        if (call, step) == self.fails_at:
            raise RuntimeError("the device is gone")

    def execute_model(self, step: SchedulerOutput) -> None:
        self.note("execute", len(self.steps))
        super().execute_model(step)

    def sample_tokens(self) -> Sampled:
        number = len(self.steps) - 1
        device = self

        class Noted(Sampled):
            def get(self) -> ModelRunnerOutput:
                device.note("get", number)
                return super().get()

        sampled = super().sample_tokens()
        return Noted(sampled.tokens, sampled.num_accepted)

    def take_draft_token_ids(self) -> list[list[int]]:
        self.note("drafts", len(self.steps) - 1)
        return super().take_draft_token_ids()

    def shutdown(self) -> None:
        self.num_shutdowns += 1


def parts(
    asynchronous: bool, k: int = K, fails_at: tuple[str, int] | None = None, num_blocks: int = 100
) -> tuple[Device, Scheduler]:
    config = SchedulerConfig(4, 64, 64, k, 1, asynchronous, frozenset())
    kv = KVBlockManager(num_blocks, 4, 64, True)
    return Device(kv, k, fails_at), Scheduler(config, kv)


def request(request_id: int, max_tokens: int = 6) -> EngineRequest:
    return EngineRequest(request_id, [request_id, 1, 2], SamplingParams(max_tokens=max_tokens), seed=0)


def expected(r: EngineRequest) -> list[int]:
    ids = list(r.prompt_token_ids)
    for _ in range(r.params.max_tokens or 0):
        ids.append(next_token(ids))
    return ids[len(r.prompt_token_ids) :]


class Loop:
    """A core with its outputs by request."""

    def __init__(self, asynchronous: bool, **options: Any) -> None:
        self.device, self.scheduler = parts(asynchronous, **options)
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.core = EngineCore(self.scheduler, UniProcExecutor(self.device), self.take, check_every_step=True)

    def take(self, outputs: list[EngineOutput]) -> None:
        assert outputs, "an empty list is not worth a call"
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in self.reasons
                self.reasons[output.request_id] = output.finish_reason

    def put(self, *items: Any) -> None:
        for item in items:
            self.core.input_queue.put(item)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_the_loop_drains_stops_and_can_be_entered_again(asynchronous: bool) -> None:
    loop = Loop(asynchronous)
    for first in (0, 10):
        requests = [request(first + i, max_tokens=1 + i) for i in range(7)]
        loop.put(*map(Add, requests), Stop(drain=True))
        loop.core.run_busy_loop()
        assert all(loop.tokens[r.request_id] == expected(r) for r in requests)
        assert all(loop.reasons[r.request_id] == "length" for r in requests)
        assert not loop.scheduler.has_requests()
    assert loop.core.num_steps == len(loop.device.steps)


def test_stop_of_an_idle_loop_returns_at_once(asynchronous: bool) -> None:
    loop = Loop(asynchronous)
    for drain in (True, False):
        loop.put(Stop(drain))
        loop.core.run_busy_loop()
    assert loop.device.calls == []


def test_an_idle_loop_waits_for_input_without_stepping(asynchronous: bool) -> None:
    loop = Loop(asynchronous)
    thread = threading.Thread(target=loop.core.run_busy_loop)
    thread.start()
    for i in range(3):
        loop.put(Add(request(i, max_tokens=2)))
        deadline = time.monotonic() + SECONDS
        while i not in loop.reasons and time.monotonic() < deadline:
            time.sleep(0.001)
        assert loop.tokens[i] == expected(request(i, max_tokens=2))
    assert thread.is_alive()
    loop.put(Stop(drain=True))
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_stop_without_drain_aborts_what_is_left(asynchronous: bool) -> None:
    loop = Loop(asynchronous)
    loop.device.before_step = lambda: loop.put(Stop(drain=False)) if len(loop.device.steps) == 2 else None
    loop.put(*(Add(request(i, max_tokens=40)) for i in range(6)))
    loop.core.run_busy_loop()
    assert loop.reasons == dict.fromkeys(range(6), "abort")
    for i, tokens in loop.tokens.items():
        assert tokens == expected(request(i, max_tokens=40))[: len(tokens)]
    assert loop.scheduler.kv.pool.num_free_blocks == 99
    gets = [step for call, step in loop.device.calls if call == "get"]
    assert gets == list(range(len(loop.device.steps))), "every step that was started is read"


def test_abort_while_a_step_is_in_flight(asynchronous: bool) -> None:
    """The aborted row is silent from then on; its slot and blocks serve another row at once."""
    loop = Loop(asynchronous)
    loop.device.before_step = lambda: loop.put(Abort((1, 77))) if len(loop.device.steps) == 2 else None
    requests = [request(i, max_tokens=20) for i in range(6)]
    loop.put(*map(Add, requests), Stop(drain=True))
    loop.core.run_busy_loop()
    assert loop.reasons == {i: "abort" if i == 1 else "length" for i in range(6)}
    for r in requests:
        tokens = loop.tokens[r.request_id]
        assert tokens == expected(r)[: len(tokens)] and (len(tokens) == 20) == (r.request_id != 1)


def test_abort_before_the_first_step(asynchronous: bool) -> None:
    loop = Loop(asynchronous)
    loop.put(Add(request(0)), Abort((0,)), Stop(drain=True))
    loop.core.run_busy_loop()
    assert loop.reasons == {0: "abort"} and loop.device.calls == []


def test_two_steps_are_in_flight_before_the_first_is_read() -> None:
    loop = Loop(True)
    loop.put(Add(request(0, max_tokens=10)), Stop(drain=True))
    loop.core.run_busy_loop()
    calls = loop.device.calls
    assert calls[:5] == [("execute", 0), ("execute", 1), ("get", 0), ("execute", 2), ("get", 1)]
    in_flight = most = 0
    for call, _ in calls:
        in_flight += {"execute": 1, "get": -1}[call]
        most = max(most, in_flight)
    assert most == 2 and in_flight == 0
    assert not any(call == "drafts" for call, _ in calls), "drafts never leave the device"


def test_a_synchronous_step_is_read_before_the_next_and_drafts_only_when_of_use() -> None:
    loop = Loop(False)
    loop.put(Add(request(0, max_tokens=3)), Stop(drain=True))
    loop.core.run_busy_loop()
    assert loop.device.calls[:4] == [("execute", 0), ("get", 0), ("drafts", 0), ("execute", 1)]
    last = len(loop.device.steps) - 1
    assert ("drafts", last) not in loop.device.calls
    loop = Loop(False, k=0)
    loop.put(Add(request(0)), Stop(drain=True))
    loop.core.run_busy_loop()
    assert {call for call, _ in loop.device.calls} == {"execute", "get"}


def test_a_rejected_request_is_answered_while_others_run(asynchronous: bool) -> None:
    loop = Loop(asynchronous)
    loop.put(Add(EngineRequest(5, [], SamplingParams(), 0)), Add(request(0)), Stop(drain=True))
    loop.core.run_busy_loop()
    assert loop.reasons == {5: "error", 0: "length"}


# the client: the same loop in its own thread


def build(device: Device, scheduler: Scheduler) -> Callable[[], Any]:
    """The parts as a worker: what `EngineClient` reads of one to describe it."""
    c = scheduler.config
    worker: Any = device
    worker.config = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.float32,
        pool_dtype=torch.float32,
        exact=True,
        max_model_len=c.max_model_len,
        max_num_seqs=c.max_num_seqs,
        max_num_batched_tokens=c.max_num_batched_tokens,
        num_speculative_tokens=c.num_speculative_tokens,
        block_size=4,
        model=SimpleNamespace(vocab_size=50),
    )
    worker.num_draft_layers = 1
    worker.model = SimpleNamespace(num_bytes=0)
    worker.budget = SimpleNamespace(num_blocks=100, as_dict=dict)
    return lambda: (worker, scheduler)


@pytest.fixture
def clients() -> Iterator[list[EngineClient]]:
    """Clients to shut down, whatever the test did."""
    made: list[EngineClient] = []
    yield made
    for client in made:
        client.shutdown()


def outputs_of(client: EngineClient, num: int) -> dict[int, list[int]]:
    """Tokens of `num` rows, once all have ended."""
    tokens: dict[int, list[int]] = {}
    ended = 0
    while ended < num:
        outputs = client.get_outputs(SECONDS)
        assert outputs, "nothing came"
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            ended += output.finish_reason is not None
    return tokens


def test_client_runs_rows_and_shuts_down_twice(asynchronous: bool, clients: list[EngineClient]) -> None:
    device, scheduler = parts(asynchronous)
    client = EngineClient(build(device, scheduler), check=True)
    clients.append(client)
    requests = [request(i) for i in range(9)]
    for r in requests:
        client.add_request(r)
    assert outputs_of(client, 9) == {r.request_id: expected(r) for r in requests}
    assert client.get_outputs(0.01) == []
    assert (client.max_model_len, client.vocab_size, client.eos_token_ids) == (64, 50, ())
    assert gc.get_freeze_count() > 0, "what was there is not gone through while rows run"
    client.shutdown()
    client.shutdown()
    assert gc.get_freeze_count() == 0
    assert device.num_shutdowns == 1
    assert client.get_outputs(0.01) == []


def test_client_aborts(asynchronous: bool, clients: list[EngineClient]) -> None:
    device, scheduler = parts(asynchronous)
    client = EngineClient(build(device, scheduler), check=True)
    clients.append(client)
    device.before_step = lambda: client.abort([3]) if len(device.steps) == 2 else None
    client.add_request(request(3, max_tokens=50))
    client.add_request(request(4))
    tokens = outputs_of(client, 2)
    assert tokens[4] == expected(request(4)) and len(tokens[3]) < 50


@pytest.mark.parametrize("fails_at", [("execute", 0), ("execute", 2), ("get", 0), ("get", 3), ("drafts", 1)])
def test_a_worker_that_raises_ends_the_loop_and_the_caller_gets_the_cause(
    fails_at: tuple[str, int], asynchronous: bool, clients: list[EngineClient]
) -> None:
    if asynchronous and fails_at[0] == "drafts":
        pytest.skip("drafts are not read in asynchronous mode")
    client = EngineClient(build(*parts(asynchronous, fails_at=fails_at)))
    clients.append(client)
    client.add_request(request(0, max_tokens=30))
    tokens: list[int] = []

    def read_all() -> None:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for output in client.get_outputs(0.3):
                tokens.extend(output.new_token_ids)

    with pytest.raises(EngineError, match="the device is gone") as caught:
        read_all()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert tokens == expected(request(0, max_tokens=30))[: len(tokens)]
    with pytest.raises(EngineError, match="the device is gone"):
        client.get_outputs(0.01)
    client.add_request(request(1))  # never blocks, nor does what follows
    client.abort([1])
    client.shutdown()
    client.shutdown()


def test_outputs_before_the_failure_are_not_lost(clients: list[EngineClient]) -> None:
    client = EngineClient(build(*parts(False, fails_at=("get", 2))))
    clients.append(client)
    client.add_request(request(0, max_tokens=1))
    client.add_request(request(1, max_tokens=30))
    client._thread.join(SECONDS)
    ended = [o.request_id for o in client.get_outputs(SECONDS) if o.finish_reason is not None]
    assert ended == [0]
    start = time.monotonic()
    with pytest.raises(EngineError):
        client.get_outputs(3.0)
    assert time.monotonic() - start < 2.0, "the failure is known: nothing to wait for"


def test_a_failing_build_raises_in_the_caller() -> None:
    def fails() -> Any:
        raise EngineError("no memory")

    with pytest.raises(EngineError, match="no memory"):
        EngineClient(fails)
