"""The peer: zae-limiter with the same callers and entities. Measures one round and exits.

Arguments: ENDPOINT TABLE CALLERS ENTITIES ACQUIRES. Prints `ACQUIRES CPU_SECONDS SECONDS` of the measured part; CPU time is
that of this process, and setup (the table, the first use of every entity) is not included.
"""

import asyncio
import resource
import sys
import time
import warnings

warnings.simplefilter("ignore")

from zae_limiter import Limit, RateLimiter, Repository  # noqa: E402


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def main(endpoint: str, table: str, callers: int, entities: int, acquires: int) -> None:
    made = Repository(table, region="eu-central-1", endpoint_url=endpoint)
    await made.create_table()
    await made.register_namespace("default")
    repository = await Repository.open(
        "default", stack=table, region="eu-central-1", endpoint_url=endpoint, auto_update=False
    )
    plenty = 1 << 30
    limits = [Limit.per_minute("rpm", plenty), Limit.per_minute("tpm", plenty)]
    await repository.set_system_defaults(limits)
    limiter = RateLimiter(repository=repository)

    async def caller(first: int, times: int) -> None:
        number = first * 16
        for _ in range(times):
            async with limiter.acquire(f"user-{number % entities}", "gpt-4", consume={"rpm": 1, "tpm": 800}):
                pass
            number += 17

    async def round_of(count: int) -> None:
        await asyncio.gather(*(caller(first, count // callers) for first in range(callers)))

    await round_of(2 * entities)
    cpu, start = processor(), time.monotonic()
    await round_of(acquires)
    print(acquires // callers * callers, processor() - cpu, time.monotonic() - start, flush=True)
    await limiter.close()
    await made.close()


asyncio.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
