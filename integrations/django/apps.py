"""The app that Django installs."""

from __future__ import annotations

from django.apps import AppConfig


class HandrailConfig(AppConfig):
    """Handrail as an app of a project: checks, migrations, admin pages and `manage.py handrail`."""

    name = "handrail.integrations.django"
    label = "handrail"
    verbose_name = "Handrail"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks."""
        from handrail.integrations.django.checks import register

        register()
