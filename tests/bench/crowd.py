#!/usr/bin/env python3
"""crowd.py: programs that share the same cores, each with as many threads as there are: what one decodes alone and what
two do together, ours in turns with llama.cpp (llama-cpp-python).

    crowd.py MODEL --ours build/release/bin/bench_engine [--threads 2] [--programs 2] [--rounds 3]

A thread that was put off its core keeps the others of its team waiting at the end of every loop. Who spins there takes
the core from whoever it waits for; who sleeps at once is late for every next loop. Ours is the engine in process, as the
peer is. Every program decodes the same number of single steps behind 16 tokens; loading is outside of the time, and
programs begin together. Prints CSV: bench,case,figure,value; the value is tokens a second of all programs, a median.
"""
import argparse
import os
import re
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from peer_llama import Peer, token_ids

PROMPT = 16


def peer_child(a):
    """One program of the peer's: waits for a line, so that all begin together; prints its tokens a second."""
    p = Peer(a.model, a.threads, "auto")
    p.prompt(token_ids(PROMPT))
    print("ready", flush=True)
    sys.stdin.readline()
    print(f"{p.steps(PROMPT, a.steps):.3f}", flush=True)
    p.close()


def peer_run(a, programs):
    cmd = [sys.executable, __file__, a.model, "--threads", str(a.threads), "--steps", str(a.steps), "--child"]
    all_ = [subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(programs)]
    for p in all_:
        if p.stdout.readline().strip() != "ready":
            sys.exit("crowd: llama.cpp did not start")
    for p in all_:
        p.stdin.write("go\n")
        p.stdin.flush()
    return sum(float(p.communicate()[0]) for p in all_)


def ours_run(a, programs):
    """Its load takes a tenth of a second, and as long for each: they begin together."""
    cmd = [a.ours, a.model, "--threads", str(a.threads), "--prompt", str(PROMPT), "--new", str(a.steps)]
    all_ = [subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(programs)]
    text = [p.communicate()[0] for p in all_]
    return sum(float(re.search(r"^decode +([0-9.]+)", t, re.MULTILINE)[1]) for t in text)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--ours", metavar="BENCH_ENGINE")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--programs", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child:
        return peer_child(a)
    runs = {"llama.cpp": peer_run, **({"backcast": ours_run} if a.ours else {})}
    got = {(who, n): [] for who in runs for n in (1, a.programs)}
    for _ in range(a.rounds):
        for (who, n), values in got.items():
            values.append(runs[who](a, n))
    print("bench,case,figure,value")
    for (who, n), values in got.items():
        print(f"crowd,{who} together {n},decode_tps,{statistics.median(values):.2f}")


if __name__ == "__main__":
    main()
