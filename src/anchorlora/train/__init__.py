"""Teach a model one skill from anyone's data, keep what it could do, and say how that went."""

from anchorlora.train.request import SkillRequest
from anchorlora.train.train import train_skill

__all__ = ["SkillRequest", "train_skill"]
