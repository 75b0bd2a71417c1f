"""The benchmarks of the paper: tasks, model, losses, metrics and trainer, which every mechanism shares."""

from separator.benchmarks.methods import METHODS, Method
from separator.benchmarks.model import BenchmarkModel, build_model
from separator.benchmarks.tasks import TASKS, Mixtures, Task, draw_mixtures
from separator.benchmarks.trainer import train_models, train_synthetic

__all__ = [
    "METHODS",
    "TASKS",
    "BenchmarkModel",
    "Method",
    "Mixtures",
    "Task",
    "build_model",
    "draw_mixtures",
    "train_models",
    "train_synthetic",
]
