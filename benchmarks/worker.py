"""What a process of the benchmark runs: `celery -A benchmarks.worker:app worker`, or `handrail
reconcile --fleet benchmarks.worker:fleet`.
"""

from __future__ import annotations

from benchmarks.fleet import bench_fleet

fleet = bench_fleet()
app = fleet.celery
