"""`manage.py seed`: a customer who was charged twice, and somebody who may approve."""

from typing import Any

from django.contrib.auth.models import Permission, User
from django.core.management.base import BaseCommand

from shop.models import Charge, Order


class Command(BaseCommand):
    help = "Make alice (a customer), bob (an approver) and an order; the passwords are the names."

    def handle(self, *args: Any, **options: Any) -> None:
        """Each time another order; the people once."""
        alice, bob = (
            User.objects.filter(username=name).first()
            or User.objects.create_user(name, password=name, is_staff=name == "bob")
            for name in ("alice", "bob")
        )
        for name in ("approve_action", "view_approval", "view_run"):
            bob.user_permissions.add(Permission.objects.get(codename=name))
        order = Order.objects.create(customer=alice, amount_cents=4_200)
        for _ in range(2):
            Charge.objects.create(order=order, amount_cents=4_200)
        self.stdout.write(f"order {order.pk}")
