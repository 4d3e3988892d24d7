"""Requests -> batches -> tokens: many requests at a time over one model, each with its adapter."""

from lorafold.engine.engine import Engine, Ticket
from lorafold.engine.errors import EngineClosedError, QueueFullError, RequestError
from lorafold.engine.request import Answer, Delta, FinishReason, Request, Sampling, TokenLogprob
from lorafold.engine.shelf import Loaded
from lorafold.engine.tally import EngineStats

__all__ = [
    "Answer",
    "Delta",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "FinishReason",
    "Loaded",
    "QueueFullError",
    "Request",
    "RequestError",
    "Sampling",
    "Ticket",
    "TokenLogprob",
]
