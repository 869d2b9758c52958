"""Orders, what was charged for them, what customers ask for, and the bank's book."""

from django.conf import settings
from django.db import models


class Order(models.Model):
    customer = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT)
    amount_cents = models.IntegerField()


class Charge(models.Model):
    order = models.ForeignKey(Order, on_delete=models.PROTECT)
    amount_cents = models.IntegerField()


class RefundRequest(models.Model):
    order = models.ForeignKey(Order, on_delete=models.PROTECT)
    run_id = models.CharField(max_length=64)
    note = models.TextField(blank=True)


class Refund(models.Model):
    """The bank's own record. In real life it is behind an API that honours idempotency keys."""

    key = models.CharField(max_length=128, unique=True)
    charge = models.ForeignKey(Charge, on_delete=models.PROTECT)
    amount_cents = models.IntegerField()
