"""What a worker process of the benchmark runs: `celery -A benchmarks.worker:app worker`."""

from __future__ import annotations

from benchmarks.fleet import bench_fleet

app = bench_fleet().celery
