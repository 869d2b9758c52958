"""The shop's addresses, and the admin's, where runs are looked at and handoffs resolved."""

from django.contrib import admin
from django.urls import path

from shop import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("refunds", views.ask),
    path("refunds/<str:run_id>", views.status),
    path("refunds/<str:run_id>/cancel", views.cancel),
    path("refunds/<str:run_id>/approval", views.approval),
]
