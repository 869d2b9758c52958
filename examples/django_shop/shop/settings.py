"""A shop's settings; what belongs to Handrail is two lines."""

import os
from pathlib import Path
from urllib.parse import urlsplit

BASE_DIR = Path(__file__).resolve().parent.parent
SECRET_KEY = os.environ.get("SHOP_SECRET_KEY", "for-a-try-on-this-machine-only")
DEBUG = "SHOP_SECRET_KEY" not in os.environ
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "shop.urls"
WSGI_APPLICATION = "shop.wsgi.application"
USE_TZ = True
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "handrail.integrations.django",
    "shop",
]
MIDDLEWARE = [
    "handrail.integrations.django.middleware.trace_context",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
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
]

_database = urlsplit(os.environ.get("SHOP_DATABASE", ""))
if _database.scheme == "postgresql":
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": _database.path.lstrip("/"),
            "USER": _database.username,
            "PASSWORD": _database.password or "",
            "HOST": os.environ.get("SHOP_DATABASE_HOST") or _database.hostname,
            "PORT": _database.port or "",
        }
    }
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": BASE_DIR / "shop.db",
            "OPTIONS": {"transaction_mode": "IMMEDIATE"},
        }
    }

# The broker, the approval secret and the like come from the environment: HANDRAIL_BROKER_URL, ...
HANDRAIL = {"FLEET": "shop.agents:fleet"}
