"""All that worker processes need, imported before they are forked."""

from fedvit.processes import import_quickly

import_quickly("fedvit.transport.workers")
