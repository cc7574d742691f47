"""Base classes of config sections, and their fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema


def key(default: Any, description: str, **kwargs: Any) -> Any:
    """Returns a config field with its default and a one-line description."""
    return Field(default=default, description=description, **kwargs)


def section(cls: type[BaseModel], description: str) -> Any:
    """Returns a nested section with the defaults of its class."""
    return Field(default_factory=cls, description=description)


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys are errors. `from_` in Python is `from` in files."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, protected_namespaces=(), serialize_by_alias=True
    )


class TextOrSection(Section):
    """Section that may be written as a plain string, the value of its first key."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {next(iter(cls.model_fields)): value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Returns a schema that allows the text, too, so that editors do."""
        schema = handler(core_schema)
        handler.resolve_ref_schema(schema)["type"] = ["object", "string"]
        return schema
