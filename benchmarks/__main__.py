"""Print every ratio with what it aims at."""

import warnings

import torch
from transformers.utils import logging

from benchmarks import answering, auditing, boundary, grids, losses, measuring, preparing, saving, steps, training

warnings.filterwarnings("ignore")
logging.disable_progress_bar()
torch.set_num_threads(1)
print(f"torch {torch.__version__}, {'GPU' if torch.cuda.is_available() else 'CPU, one thread'}; medians of alternating rounds\n")
steps.protection()
steps.growth()
losses.words()
measuring.drift()
saving.checkpoint()
boundary.growth()
boundary.narrow()
auditing.command()
answering.speed()
answering.reading()
answering.five_shot()
preparing.encoding()
preparing.cores()
preparing.own()
training.passes()
grids.warm()
