"""Where requests go: the proxy's real Chooser in a queue simulation, and its cost in time and memory.

    python bench/routing.py              # 64,000 requests at 128 and 384 in flight, 4 replicas; then a million prompts

G = 8 requests per prompt follow each other; as one is answered the next is sent. Prompts share a 23-token template; their
lengths and those of the completions are log-normal, cut where a mathematics data set and a limit of 2,048 tokens cut them
(prompt: median 75 tokens beside the template, completion: median 420). A replica writes 40 tokens/s per request, 1.5 %
slower for each request beside it. Versions advance every 512 requests; a group's requests keep the version it began with.

cold: nobody had the prompt; 12.5 % is the least at G = 8, as one of eight must be first. spill: its replica was more than
8 requests ahead of the least busy. load: requests per replica, against an even share. (A published run of this kind: 14.2 %
cold, 1.3 % spill.)
"""
import argparse, heapq, random, resource, statistics, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from proxy import Chooser

G, TEMPLATE_TOKENS, VERSION_REQUESTS = 8, 23, 512

def prompts(count: int, dice: random.Random):
    template = [dice.randrange(150_000) for _ in range(TEMPLATE_TOKENS)]
    for _ in range(count):
        yield template + [dice.randrange(150_000) for _ in range(min(700, max(8, int(dice.lognormvariate(4.32, 0.55)))))]

def simulate(requests: int, in_flight: int, replicas: int, seed: int) -> tuple[dict, list[float]]:
    """(choices by kind, requests per replica as a multiple of an even share)."""
    dice, chooser, now, running = random.Random(seed), Chooser(), 0.0, []
    loads = {f"http://10.0.0.{number}:8000": 0 for number in range(replicas)}
    got, sent = dict.fromkeys(loads, 0), 0
    for prompt in prompts(requests // G, dice):
        version = f"policy-v{sent // VERSION_REQUESTS}"
        for _ in range(G):
            if len(running) >= in_flight:
                now, url = heapq.heappop(running)
                loads[url] -= 1
            url = chooser.choose(version, prompt, loads)
            tokens = min(2048, max(16, int(dice.lognormvariate(6.04, 0.7))))
            heapq.heappush(running, (now + tokens / 40 * (1 + 0.015 * loads[url]), url))
            loads[url] += 1
            got[url] += 1
            sent += 1
    return chooser.counts, [one * replicas / sent for one in got.values()]

def cost(count: int) -> None:
    """Time per request by prompt length, and memory while `count` prompts go through one chooser."""
    chooser, loads, dice = Chooser(), dict.fromkeys("abcd", 0), random.Random(0)
    print("prompt tokens  us/request (median of 200)")
    for tokens in (100, 1_000, 10_000, 100_000):
        seen = []
        for _ in range(200):
            prompt = [dice.randrange(150_000)] * tokens
            start = time.perf_counter()
            chooser.choose("policy-v1", prompt, loads)
            seen.append(time.perf_counter() - start)
        print(f"{tokens:13,}  {statistics.median(seen) * 1e6:10.0f}")
    chooser = Chooser()
    print("prompts seen  blocks kept  resident MB (peak)")
    for number, prompt in enumerate(prompts(count, dice)):
        chooser.choose(f"policy-v{number // 64}", prompt, loads)
        if number + 1 in (1_000, 30_000, count // 10, count // 2, count):
            print(f"{number + 1:12,}  {len(chooser.blocks):11,}  {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:8.1f}", flush=True)

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64_000)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[128, 384])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=1_000_000, help="of the memory test (0: none)")
    args = parser.parse_args()
    print("in flight  seed  affinity    cold   spill   load, × an even share")
    for in_flight in args.in_flight:
        for seed in range(args.seeds):
            counts, shares = simulate(args.requests, in_flight, args.replicas, seed)
            kinds = "  ".join(f"{counts[kind] / args.requests:6.2%}" for kind in ("affinity", "cold", "spill"))
            print(f"{in_flight:9}  {seed:4}    {kinds}   {min(shares):.3f} to {max(shares):.3f}", flush=True)
    if args.prompts:
        cost(args.prompts)

if __name__ == "__main__":
    main()
