"""A shop: orders, refunds, and what belongs to Handrail in three lines."""

import base64
import os
from typing import Any

from flask import Flask, Response, abort, g, jsonify, request
from flask_sqlalchemy import SQLAlchemy

from handrail.errors import HandrailError, TryLater
from handrail.integrations.flask import handrail

db = SQLAlchemy()
STATUS = {"not-allowed": 403, "unknown-run": 404, "invalid-run": 400}


def create_app() -> Flask:
    """Make the application; the broker and the like come from HANDRAIL_* in the environment."""
    from shop import models
    from shop.views import pages

    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ.get("SHOP_DATABASE", "sqlite:///shop.db")
    app.config["HANDRAIL_FLEET"] = "shop.agents:fleet"
    db.init_app(app)
    handrail.init_app(app)
    app.register_blueprint(pages)
    app.before_request(log_in)
    app.register_error_handler(HandrailError, refused)
    app.cli.command("seed")(models.seed)
    return app


def log_in() -> None:
    """Who it is, by basic authentication; no cookie, so nothing that another site could forge."""
    from shop.models import User

    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    name, _, password = base64.b64decode(given or b"").decode().partition(":")
    g.user = db.session.query(User).filter_by(name=name).first()
    if kind != "Basic" or g.user is None or not g.user.has_password(password):
        abort(401)


def refused(error: HandrailError) -> tuple[Response, int]:
    """Every error of Handrail's has a stable code, and says what to do."""
    status = 503 if isinstance(error, TryLater) else STATUS.get(error.code, 409)
    told: dict[str, Any] = {"code": error.code, "error": str(error)}
    return jsonify(told), status
