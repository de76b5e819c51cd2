"""Speed and memory as ratios, measured side by side in one process: print each with what it aims at; nothing asserts."""

import warnings

import torch
from transformers.utils import logging

from benchmarks import answering, auditing, boundary, grids, losses, preparing, steps, training

warnings.filterwarnings("ignore")
logging.disable_progress_bar()
torch.set_num_threads(1)
print(f"torch {torch.__version__}, {'GPU' if torch.cuda.is_available() else 'CPU, one thread'}; medians of alternating rounds\n")
steps.protection()
steps.growth()
losses.words()
steps.drift()
steps.checkpoint()
boundary.growth()
boundary.narrow()
auditing.command()
answering.speed()
answering.reading()
answering.generating()
answering.five_shot()
preparing.encoding()
preparing.cores()
preparing.own()
training.passes()
training.chats()
grids.warm()
