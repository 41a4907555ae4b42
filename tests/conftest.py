"""What holds for all tests."""

import signal

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about what is tested.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

# A job that a script started in the background ignores Ctrl-C, and so would everything that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
