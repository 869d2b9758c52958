"""A Django project for the tests: one site, two databases, set up once in a test process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import django
import django.test.utils
from django.conf import settings
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse

SECRET: Final = "tests-only/" + "0123456789" * 3


@cache
def set_up(place: Path, postgres_url: str) -> None:
    """Configure Django for this process, and make the tables of both databases."""
    from sqlalchemy.engine import make_url

    address = make_url(postgres_url)
    settings.configure(
        DEBUG=False,
        SECRET_KEY="not-that-of-approvals",
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF="tests.django_site",
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "handrail.integrations.django",
        ],
        MIDDLEWARE=[
            "handrail.integrations.django.middleware.trace_context",
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": place / "site.db",
                "OPTIONS": {"transaction_mode": "IMMEDIATE"},
            },
            "pg": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": address.database,
                "USER": address.username,
                "HOST": address.query["host"],
            },
        },
        HANDRAIL={},
    )
    django.setup()
    from django.core.management import call_command

    for alias in ("default", "pg"):
        with django.test.utils.override_settings(HANDRAIL={"DATABASE": alias}):
            call_command("migrate", database=alias, verbosity=0)


# ---- the site's own pages ------------------------------------------------------------------------


def ask(request: HttpRequest) -> HttpResponse:
    """Ask for a run inside a transaction, and, if told so, fail before it is committed."""
    from handrail.integrations.django import client

    with transaction.atomic():
        run_id = client.enqueue("look", goal="see", input={"order_id": 1})
        if "fail" in request.GET:
            raise ValueError("after it was enqueued")
    return JsonResponse({"run": run_id})


async def ask_later(request: HttpRequest) -> HttpResponse:
    """The same in an asynchronous view."""
    from handrail.integrations.django import client

    run_id = await client.aenqueue("look", goal="see", input={"order_id": 1})
    return JsonResponse((await client.aget(run_id)).to_json())


def urls() -> list[Any]:
    from django.contrib import admin
    from django.urls import path

    return [
        path("admin/", admin.site.urls),
        path("ask", ask),
        path("ask-later", ask_later),
    ]


def __getattr__(name: str) -> Any:
    if name == "urlpatterns":  # the admin's are known only when the apps are
        found = globals()["urlpatterns"] = urls()
        return found
    raise AttributeError(name)


def text_of(answer: Any) -> str:
    """A page's text."""
    return str(answer.content.decode())


def rows(text: str) -> Any:
    """Read what a page said in JSON."""
    return json.loads(text)
