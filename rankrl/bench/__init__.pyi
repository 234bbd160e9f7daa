from .surrogate import Surrogate
from .table import Table, read_tables, write_tables
from .task import BenchEnv, BenchTask, bench_task, bench_tasks

__all__ = [
    "BenchEnv",
    "BenchTask",
    "Surrogate",
    "Table",
    "bench_task",
    "bench_tasks",
    "read_tables",
    "write_tables",
]
