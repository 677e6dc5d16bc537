"""A draft service in plain gRPC, written from docs/protocol.md alone: it proposes what followed the last two tokens.

python examples/lookup_draft.py 50052
tandem doctor draft 127.0.0.1:50052
"""

import asyncio
import sys

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.v1 import draft_pb2, draft_pb2_grpc, types_pb2

MAX_ID = 2**31 - 1
REFUSED = grpc.StatusCode.INVALID_ARGUMENT


class Sequence:
    """The tokens of one sequence."""

    def __init__(self, opening):
        require(opening.HasField("sampling"), "open.sampling is missing")
        self.tokens = []
        self.max_length = opening.max_length or MAX_ID

    def step(self, step):
        """Answer a step with a proposal."""
        require(step.HasField("committed"), "step.committed is missing")
        require(
            step.WhichOneof("question") == "propose", "step.propose is missing, and nothing else is granted"
        )
        base = step.committed.base_length
        count = step.propose.max_tokens
        tokens = self.tokens[: max(base, 0)] + list(step.committed.token_ids)
        require(
            0 <= base <= len(self.tokens),
            f"base_length is {base}; the sequence has {len(self.tokens)} tokens",
        )
        require(min(tokens, default=0) >= 0, "token ids must be at least 0")
        require(
            len(tokens) <= self.max_length, f"max_length is {self.max_length}; it has {len(tokens)} tokens"
        )
        require(count >= 0, f"max_tokens is {count}; it must be at least 0")
        self.tokens = tokens
        count = min(count, self.max_length - len(tokens))
        return types_pb2.Proposal(base_length=len(tokens), token_ids=self.following()[:count])

    def following(self):
        """All that followed the last two tokens when they last occurred."""
        for place in range(len(self.tokens) - 3, -1, -1):
            if self.tokens[place : place + 2] == self.tokens[-2:]:
                return self.tokens[place + 2 :]
        return []


class LookupDraft(draft_pb2_grpc.DraftServiceServicer):
    """Serves streams of sequences."""

    async def GetModelInfo(self, request, context):
        return draft_pb2.DraftServiceGetModelInfoResponse(model_info=types_pb2.ModelInfo(name="lookup"))

    async def Propose(self, requests, context):
        sequences = {}
        latest = 0
        async for request in requests:
            response = draft_pb2.ProposeResponse()
            for part in request.parts:
                if part.sequence < 1:
                    await context.abort(REFUSED, "sequences count from 1")
                is_new = part.sequence > latest
                latest = max(part.sequence, latest)
                if is_new or part.sequence in sequences:  # else it has ended, which the caller learns
                    answer(sequences, part, response)
            if response.parts:
                yield response


def answer(sequences, part, response):
    """Take what is said of a sequence; add what there is to answer."""
    number = part.sequence
    content = part.WhichOneof("content")
    try:
        require((content == "open") != (number in sequences), "a sequence begins with one open")
        if content == "open":
            sequences[number] = Sequence(part.open)
        elif content == "step":
            response.parts.add(sequence=number, proposal=sequences[number].step(part.step))
        elif content == "finish":
            del sequences[number]
            response.parts.add(sequence=number, ending=types_pb2.Ending())
        else:
            require(content == "cancel", "a part has no content")
            del sequences[number]
    except ValueError as error:
        sequences.pop(number, None)
        response.parts.add(
            sequence=number, ending=types_pb2.Ending(code=REFUSED.value[0], message=str(error))
        )


def require(condition, sentence):
    """Refuse what does not hold."""
    if not condition:
        raise ValueError(sentence)


async def serve(port):
    """Start a server, and return it with its port."""
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(LookupDraft(), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


async def main():
    """Serve until a signal ends the process."""
    server, port = await serve(int(sys.argv[1]))
    print(f"a draft service on 127.0.0.1:{port}")  # noqa: T201
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
