{{- /* A Grafana dashboard (schema 39) from an entry of files/dashboards.yaml: two panels per row, one query per legend. */}}
{{- define "fairlead.dashboard" -}}
{{- $source := dict "type" "prometheus" "uid" "${datasource}" }}
{{- $variables := list (dict "name" "datasource" "type" "datasource" "query" "prometheus" "label" "Data source") }}
{{- range .dashboard.variables }}
{{- $variable := dict "name" .name "type" "query" "datasource" $source "query" .query "refresh" 2 "includeAll" true "multi" true "allValue" ".*" }}
{{- $_ := set $variable "current" (dict "text" "All" "value" "$__all") }}
{{- $variables = append $variables $variable }}
{{- end }}
{{- $panels := list }}
{{- range $index, $panel := .dashboard.panels }}
{{- $targets := list }}
{{- range $legend, $expr := $panel.queries }}
{{- $targets = append $targets (dict "datasource" $source "expr" $expr "legendFormat" $legend "refId" (printf "q%d" (len $targets))) }}
{{- end }}
{{- $place := dict "h" 8 "w" 12 "x" (mul 12 (mod $index 2)) "y" (mul 8 (div $index 2)) }}
{{- $defaults := dict "unit" $panel.unit "min" 0 }}
{{- $made := dict "id" (add1 $index) "type" "timeseries" "title" $panel.title "description" (default "" $panel.description) "gridPos" $place }}
{{- $panels = append $panels (merge $made (dict "datasource" $source "targets" $targets "fieldConfig" (dict "defaults" $defaults "overrides" list))) }}
{{- end }}
{{- $made := dict "uid" (printf "fairlead-%s" .slug) "title" .dashboard.title "tags" (list "fairlead") "schemaVersion" 39 "editable" true }}
{{- $time := dict "from" "now-1h" "to" "now" }}
{{- merge $made (dict "refresh" "30s" "time" $time "templating" (dict "list" $variables) "panels" $panels) | toJson }}
{{- end }}
