"""`tandem admin`: see and steer a coordinator that runs."""

from __future__ import annotations

from coordinator.cli.admin import doctor, health, stats, status
from coordinator.cli.admin.config import config
from coordinator.cli.admin.replicas import replicas
from coordinator.cli.admin.requests import requests
from coordinator.cli.command import new_app

admin = new_app(
    "See and steer a coordinator that runs.\n\n"
    "Every command takes --output table, json or yaml, and the options of the connection: on the command line, in the "
    "environment (TANDEM_CLIENT_ADDRESS and so on) or from a context (tandem context --help).\n\n"
    "\b\nExit codes:\n  0  done\n  1  failed\n  2  wrongly called\n  3  unhealthy\n  4  not reachable\n  5  refused"
)
status.add_to(admin)
admin.add_typer(replicas, name="replicas")
admin.add_typer(requests, name="requests")
stats.add_to(admin)
admin.add_typer(config, name="config")
health.add_to(admin)
doctor.add_to(admin)
