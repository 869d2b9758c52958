"""The tables of the first release, and what Django has to know of them."""

from __future__ import annotations

from django.db import migrations

from handrail.integrations.django.migrating import LedgerRevision
from handrail.integrations.django.models import MODELS


class Migration(migrations.Migration):
    """Revision 0001."""

    initial = True
    dependencies = ()
    operations = (
        *(
            migrations.CreateModel(name=name, fields=fields, options=options)
            for name, fields, options in MODELS
        ),
        LedgerRevision("0001"),
    )
