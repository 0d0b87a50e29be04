"""llama.cpp under load, stock or on our planner: a line of JSON for each act, with digests of all that it computed.

    python llama_cpp_load.py JOB

JOB is a file of JSON: what `hooked.worker.Engine` takes, `layers` on devices, `lora` (a file), `turns` (the level
changes with each context), and `acts`, pairs of a function's name and its arguments.  The digests of two runs are equal
where their bits are; the test checks the other output of an act.
"""

import ctypes
import gc
import json
import sys
import threading
from pathlib import Path

import llama_cpp_contexts
from llama_cpp_contexts import Client, Refused, resident
from llama_cpp_walks import wandered

FEW = 120
"""Contexts after which memory no longer grows."""


def generated(client: Client, count: int, sizes: list[int]) -> dict:
    """Many tokens: contexts of several sizes one after the other, each of which shifts its cache or forgets."""
    digests, tokens, shifts = [], 0, 0
    for i, size in enumerate(sizes):
        with client.context(n_ctx=size, flash_attn_type=i % 2, offload_kqv=i % 3 != 2) as context:
            context.generate(count // len(sizes), seed=i)
            digests.append(context.digest)
            tokens += context.tokens
            shifts += context.shifts
    return {"digest": digests, "tokens": tokens, "shifting": shifts}


WAYS = ({}, {"flash_attn_type": 1}, {"n_ctx": 512, "n_ubatch": 64}, {"embeddings": True}, {"n_seq_max": 3},
        {"n_seq_max": 2, "kv_unified": False}, {"flash_attn_type": 1, "embeddings": True}, {"offload_kqv": False},
        {"op_offload": False, "n_ubatch": 7}, {"n_threads": 2, "n_threads_batch": 2})
"""Of contexts."""


def opened(client: Client, count: int) -> dict:
    """Many contexts, of a few tokens each; how far memory grows once the first have come and gone."""
    digests, tokens, before = [], 0, None
    for i in range(count):
        way = WAYS[i % len(WAYS)]
        with client.context(**way) as context:
            sequences = range(way.get("n_seq_max", 1))
            context.decode(context.prompt(5 + 3 * (i % 17), i), 0, sequences, outputs=1 + i % 3)
            for k in range(i % 5):
                context.decode([1 + k], 5 + 3 * (i % 17) + k, sequences)
            digests.append(context.digest)
            tokens += context.tokens
        if i + 1 == min(FEW, count):
            before = held()
    return {"digest": digests, "tokens": tokens, "contexts": count,
            "growth": [now - then for now, then in zip(held(), before, strict=True)]}


def held() -> tuple[int, int]:
    """Bytes of resident memory, and bytes allocated by malloc."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(ctypes.c_size_t(0))
    return resident(), given(libc)


class Given(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]


def given(libc: ctypes.CDLL) -> int:
    libc.mallinfo2.restype = Given
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd


def in_threads(client: Client, count: int) -> dict:
    """Two contexts of different kinds one after the other, then each in its own thread while the main thread reads
    plans."""
    kinds = ({"n_ctx": 256}, {"n_ctx": 512, "flash_attn_type": 1})

    def run(kind: int) -> str:
        digests = []
        for seed in range(3):
            with client.context(**kinds[kind]) as context:
                context.generate(count // 3, seed=kind + 2 * seed)
                digests.append(context.digest)
        return " ".join(digests)

    def work(kind: int) -> None:
        try:
            found[kind] = run(kind)
        except BaseException as error:
            failed.append(repr(error))

    def look() -> None:
        try:
            while not over.wait(0.01):
                seen.append(len(looked(client)))
        except BaseException as error:
            failed.append(repr(error))

    alone = [run(kind) for kind in range(len(kinds))]
    found, failed, seen, over = {}, [], [0], threading.Event()
    threads = [threading.Thread(target=work, args=(kind,)) for kind in range(len(kinds))]
    watcher = threading.Thread(target=look)
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    watcher.join()
    return {"digest": alone, "together": [found.get(kind) for kind in range(len(kinds))], "failed": failed,
            "looked": len(seen), "plans": max(seen)}


def looked(client: Client) -> tuple:
    """Verify the current plans; does nothing in a process without the hook."""
    if not client.is_hooked:
        return ()
    import ggml_sched.llama_cpp as ours

    plans = ours.plans()
    for plan in plans:
        plan.verify()
    return plans


def restored(client: Client, rounds: int) -> dict:
    """States saved, and restored in contexts that computed something else since; the difference of later rows."""
    digests, apart = [], []
    for i in range(rounds):
        way = {"n_seq_max": 2, "flash_attn_type": i % 2, "kv_unified": bool(i % 3)}
        with client.context(**way) as first, client.context(**way) as second:
            at = first.generate(9, prompt=20 + i, seed=i)
            whole, one = first.state(), first.state(0)
            want = [first.decode([token], at + k) for k, token in enumerate((3, 1, 4))]
            second.decode(second.prompt(17, i), 0, (1,))
            second.restore(whole)
            apart.append(difference(second, want, at, 0))
            client.api.llama_memory_clear(second.memory, True)
            second.restore(one, 1)
            apart.append(difference(second, want, at, 1))
            first.restore(whole)
            apart.append(difference(first, want, at, 0))
            digests += [first.digest, second.digest]
    return {"digest": digests, "apart": apart}


def difference(context: llama_cpp_contexts.Context, want: list, at: int, sequence: int) -> float:
    """The largest difference of the next rows from the expected ones; 0 if every bit is equal."""
    got = [context.decode([token], at + k, (sequence,)) for k, token in enumerate((3, 1, 4))]
    return max(0.0 if a.tobytes() == b.tobytes() else float(abs(a - b).max()) for a, b in zip(want, got, strict=True))


def switched(client: Client, rounds: int) -> dict:
    """An adapter, embeddings and causal attention, each on and off again, while a context lives."""
    api, differs = client.api, []
    adapter = client.adapter()
    with client.context(n_ctx=512) as context:
        for i in range(rounds):
            # Clearing is what every model's memory can do.
            at = context.generate(5, seed=i)
            plain = context.decode([7], at)
            api.llama_memory_clear(context.memory, True)
            if adapter:
                context.lora(adapter, 0.5 + i)
            context.generate(5, seed=i)
            differs.append(context.decode([7], at).tobytes() != plain.tobytes())
            context.lora(None, 0.0)
            context.set_embeddings(True)
            context.decode(context.prompt(3, i), at + 1, outputs=2)
            context.set_embeddings(False)
            api.llama_set_causal_attn(context.handle, False)
            context.decode(context.prompt(4, i), at + 4)
            api.llama_set_causal_attn(context.handle, True)
            context.decode([8], at + 8)
            api.llama_memory_clear(context.memory, True)
        digest, tokens = context.digest, context.tokens
    if adapter:
        api.llama_adapter_lora_free(adapter)
    return {"digest": [digest], "tokens": tokens, "differs": differs}


def interrupted(client: Client, rounds: int) -> dict:
    """Decodes that their caller cancels, and graphs that a callback looks into, between decodes that are left alone."""
    api, looked_at, cancelled = client.api, [0, 0], 0
    left = [0]

    def look(tensor, ask, data) -> bool:
        looked_at[bool(ask)] += 1
        return not ask or looked_at[True] % 3 == 0

    def enough(data) -> bool:
        left[0] -= 1
        return left[0] == 0

    looking, stopping = api.ggml_backend_sched_eval_callback(look), api.ggml_abort_callback(enough)
    digests = []
    with client.context(n_ctx=512, cb_eval=looking) as context:
        context.generate(10)
        digests.append(context.digest)
    with client.context(n_ctx=512) as context:
        for i in range(rounds):
            api.llama_set_abort_callback(context.handle, stopping, None)
            left[0] = 1 + 5 * i     # where all layers are on devices, the host has one node
            try:
                context.decode(context.prompt(20, i), 0)
            except Refused:
                cancelled += 1
            api.llama_set_abort_callback(context.handle, api.ggml_abort_callback(), None)
            api.llama_memory_clear(context.memory, True)
            context.decode(context.prompt(20, i), 0)
            api.llama_memory_clear(context.memory, True)
        digests.append(context.digest)
    return {"digest": digests, "looked": looked_at, "cancelled": cancelled}


def refused(client: Client, most: int) -> dict:
    """Contexts of devices that give n buffers and no more, until one opens; after each a context that has room."""
    digests, words, named = [], [], 0
    for buffers in range(most):
        for way in ({}, {"flash_attn_type": 1, "n_ctx": 512}):
            client.refuse_after(buffers)
            try:
                with client.context(**way) as context:
                    context.generate(3)
            except Refused as error:
                words.append(str(error))
                named += any("ggml_sched: HOST" in line and "refused" in line for line in client.log)
            client.refuse_after(-1)
            with client.context(**way) as context:
                context.generate(7, seed=buffers)
                digests.append(context.digest)
    return {"digest": digests, "words": words, "named": named}


ACTS = {act.__name__: act for act in (generated, opened, in_threads, restored, switched, interrupted, refused,
                                    wandered)}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    client = Client(job)
    for name, arguments in job["acts"]:
        said = ACTS[name](client, **arguments)
        if client.is_hooked:
            import ggml_sched.llama_cpp as ours

            said |= {"served": ours.served(), "calls": sum(calls for calls, _ in ours.counters().values()),
                     "alive": len(looked(client))}
        print(json.dumps({"act": name, **said}), flush=True)
    client.api.llama_model_free(client.loaded)


if __name__ == "__main__":
    main()
