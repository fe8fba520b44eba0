{{- /* A Grafana dashboard (schema 39) from an entry of files/dashboards.yaml: rows of panels, two beside each other, one query per legend. */}}
{{- define "fairlead.dashboard" -}}
{{- $source := dict "type" "prometheus" "uid" "${datasource}" }}
{{- $variables := list (dict "name" "datasource" "type" "datasource" "query" "prometheus" "label" "Data source") }}
{{- range .dashboard.variables }}
{{- $variable := dict "name" .name "type" "query" "datasource" $source "query" .query "refresh" 2 "includeAll" true "multi" true "allValue" ".*" }}
{{- $_ := set $variable "current" (dict "text" "All" "value" "$__all") }}
{{- $variables = append $variables $variable }}
{{- end }}
{{- $panels := list }}
{{- $y := 0 }}
{{- range .dashboard.rows }}
{{- $place := dict "h" 1 "w" 24 "x" 0 "y" $y }}
{{- $panels = append $panels (dict "id" (len $panels | add1) "type" "row" "title" .title "collapsed" false "gridPos" $place "panels" list) }}
{{- $y = add1 $y }}
{{- range $index, $panel := .panels }}
{{- $queries := $panel.queries | default dict }}
{{- with $panel.quantiles }}
{{- range $name, $quantile := dict "p50" "0.5" "p99" "0.99" }}
{{- $legend := printf "%s, {{%s}}" $name $panel.quantiles.by }}
{{- $expr := printf "histogram_quantile(%s, sum by (%s, le) (RATE(%s_bucket{FILTER})))" $quantile $panel.quantiles.by $panel.quantiles.histogram }}
{{- $_ := set $queries $legend $expr }}
{{- end }}
{{- end }}
{{- $targets := list }}
{{- range $legend, $expr := $queries }}
{{- $expr = $expr | replace "FILTER" `namespace=~"$namespace", service=~"$service"` }}
{{- $expr = regexReplaceAll `RATE\(([^()]+)\)` $expr "rate(${1}[$$__rate_interval])" }}
{{- $targets = append $targets (dict "datasource" $source "expr" $expr "legendFormat" $legend "refId" (printf "q%d" (len $targets))) }}
{{- end }}
{{- $place := dict "h" 8 "w" 12 "x" (mul 12 (mod $index 2)) "y" (add $y (mul 8 (div $index 2))) }}
{{- $defaults := dict "unit" $panel.unit "min" 0 }}
{{- $made := dict "id" (len $panels | add1) "type" "timeseries" "title" $panel.title "description" (default "" $panel.description) "gridPos" $place }}
{{- $panels = append $panels (merge $made (dict "datasource" $source "targets" $targets "fieldConfig" (dict "defaults" $defaults "overrides" list))) }}
{{- end }}
{{- $y = add $y (mul 8 (div (len .panels | add1) 2)) }}
{{- end }}
{{- $links := list (dict "type" "dashboards" "tags" (list "fairlead") "title" "Fairlead" "asDropdown" true "includeVars" true "keepTime" true) }}
{{- $made := dict "uid" (printf "fairlead-%s" .slug) "title" .dashboard.title "tags" (list "fairlead") "schemaVersion" 39 "editable" true }}
{{- $time := dict "from" "now-1h" "to" "now" }}
{{- merge $made (dict "refresh" "30s" "time" $time "templating" (dict "list" $variables) "links" $links "panels" $panels) | toJson }}
{{- end }}
