"""Make the tables of all reproduction pages at one state of the source.

    python benchmarks/reproduce --trace burstgpt=FILE --trace azure=FILE   # what is missing or of another state
    python benchmarks/reproduce                                            # without FairBatching's page
    python benchmarks/reproduce --list                                     # only say which tables these are

Each table is stored as it ends, so that Ctrl-C loses one, with a digest of the source (sched, configs and these
scripts, without comments), and written into its page. Refuses to run on uncommitted changes, since the commit in the
JSON would not have them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import page

SCRIPTS = ("kairos", "deflection", "fairbatching", "flowprefill", "flowprefill_stops", "slos_serve")
MADE = (":!docs", ":!benchmarks/results")  # what the scripts themselves write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only list the tables to make")
    parser.add_argument("--jobs", help="processes [all cores]")
    parser.add_argument("--trace", action="append", default=[], metavar="WORKLOAD=FILE", help="for FairBatching's page")
    args = parser.parse_args()
    if not args.list and (changed := page.common.git("status", "--porcelain", "--", ".", *MADE)):
        parser.error(f"uncommitted changes; commit or stash them first:\n{changed}")
    for name in SCRIPTS:
        if name == "fairbatching" and not (args.trace or args.list):
            print("fairbatching: left out, because two of its tables need --trace", flush=True)
            continue
        flags = ["--list"] if args.list else ["--jobs", args.jobs] if args.jobs else []
        traces = [word for trace in args.trace for word in ("--trace", trace)] if name == "fairbatching" else []
        script = Path(__file__).with_name(f"{name}.py")
        done = subprocess.run([sys.executable, script, "--missing", *flags, *traces], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
