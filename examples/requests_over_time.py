"""Requests that arrive over time, in one engine: decode rows go on while new prompts prefill.

python examples/requests_over_time.py
"""

import asyncio

from mla_compile import Engine, SamplingParams
from mla_compile.engine import Checkpoint

PROMPTS = ["In the beginning", "And it came to pass", "Blessed are", "The LORD is my"]


async def client(engine: Engine, checkpoint: Checkpoint, number: int, max_tokens: int) -> str | None:
    """Send a request a little later than the previous client, and read the tokens as they come."""
    await asyncio.sleep(0.05 * number)
    params = SamplingParams(temperature=0.7, seed=number, max_tokens=max_tokens, stop="\n")
    request = engine.add(checkpoint.encode(PROMPTS[number]), params)
    async for _ in request:  # each token, as soon as a step has emitted it
        pass
    return request.completion.text


async def serve(engine: Engine, checkpoint: Checkpoint, max_tokens: int) -> list[str | None]:
    clients = [client(engine, checkpoint, number, max_tokens) for number in range(len(PROMPTS))]
    return await asyncio.gather(*clients)


def main(max_tokens: int = 48, compile: bool = True) -> None:
    checkpoint = Checkpoint.load()
    engine = Engine(
        checkpoint.model,
        num_speculative_tokens=3,
        max_rows=4,
        max_model_len=256,
        tokenizer=checkpoint.tokenizer,
        compile=compile,
    )
    for prompt, text in zip(PROMPTS, asyncio.run(serve(engine, checkpoint, max_tokens)), strict=True):
        print(f"{prompt} ...{text}\n")
    stats = engine.stats
    print(f"{stats.num_tokens} tokens in {stats.num_steps} steps, {stats.num_mixed_steps} of them mixed,")
    print(f"{stats.acceptance_length or 0:.2f} tokens a row and step")


if __name__ == "__main__":
    main()
