"""Replicas as actors of a Ray on this machine. `scripts/test` names a Python that has Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")
