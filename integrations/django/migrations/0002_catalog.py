"""The catalog of workflows."""

from __future__ import annotations

from django.db import migrations

from handrail.integrations.django.migrating import LedgerRevision


class Migration(migrations.Migration):
    """Revision 0002."""

    dependencies = (("handrail", "0001_ledger"),)
    operations = (LedgerRevision("0002"),)
