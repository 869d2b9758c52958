"""What is known of a ledger that was set back."""

from __future__ import annotations

from django.db import migrations

from handrail.integrations.django.migrating import LedgerRevision


class Migration(migrations.Migration):
    """Revision 0003."""

    dependencies = (("handrail", "0002_catalog"),)
    operations = (LedgerRevision("0003"),)
