"""What routes are called with: the service, and who calls."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from onestem.server.api.bodies import Bodies
from onestem.server.objects.tenants import Tenant
from onestem.server.service import Service


def service_of(request: Request) -> Service:
    """The service that a request was sent to."""
    service: Service = request.app.state.service
    return service


def bodies_of(request: Request) -> Bodies:
    """What reads large bodies where a request was sent to."""
    bodies: Bodies = request.app.state.bodies
    return bodies


# Coroutines, though they wait for nothing: FastAPI calls functions in a thread.
async def _the_service(request: Request) -> Service:
    return service_of(request)


async def _the_tenant(request: Request) -> Tenant:
    headers = request.headers
    return service_of(request).keys.tenant(headers.get("authorization"), headers.get("x-api-key"))


async def _operated(request: Request) -> Service:
    service = service_of(request)
    service.keys.operator(request.headers.get("authorization"))
    return service


Serves = Annotated[Service, Depends(_the_service)]
Asks = Annotated[Tenant, Depends(_the_tenant)]
Operates = Annotated[Service, Depends(_operated)]  # for the operator alone
