"""What the process does that workers are forked from: import all that they need, then wait and fork."""

import atexit
import os
import signal

from fedvit.engine.processes import import_quickly

before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command itself tells of an interruption
atexit.register(os._exit, 0)  # it ends at once, as the command does
import_quickly("fedvit.engine.pool")
signal.signal(signal.SIGINT, before)  # what a program's own processes get
