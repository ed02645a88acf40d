"""The start of the process that workers are forked from: import everything they need, then wait and fork."""

import atexit
import os
import signal

from fedvit.engine.processes import import_quickly

before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command itself reports an interruption
atexit.register(os._exit, 0)  # exit at once, as the command does
import_quickly("fedvit.engine.pool")
signal.signal(signal.SIGINT, before)  # for processes that a program starts itself
