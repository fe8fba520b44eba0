{{- /* Recording rules and burn-rate alerts of files/slo.yaml: the rules of one group, which must be evaluated each minute. */}}
{{- define "fairlead.slo.rules" -}}
{{- $objectives := .Values.monitoring.slo }}
{{- $runbooks := .Values.monitoring.runbooks }}
{{- $made := .Files.Get "files/slo.yaml" | fromYaml }}
{{- range $made.indicators }}
- record: service:fairlead_slo_bad_requests:rate5m
  expr: {{ .bad | quote }}
  labels: {slo: {{ .slo }}}
- record: service:fairlead_slo_requests:rate5m
  expr: {{ .all | quote }}
  labels: {slo: {{ .slo }}}
- record: fairlead:slo_objective
  expr: vector({{ index $objectives .slo }})
  labels: {slo: {{ .slo }}}
{{- end }}
{{- range $made.windows }}
- record: service:fairlead_slo_bad_requests:ratio_rate{{ . }}
  expr: sum_over_time(service:fairlead_slo_bad_requests:rate5m[{{ . }}]) / (sum_over_time(service:fairlead_slo_requests:rate5m[{{ . }}]) > 0)
{{- end }}
{{- range $indicator := $made.indicators }}
{{- $budget := printf "(1 - %v)" (index $objectives .slo) }}
{{- range $speed := $made.alerts }}
{{- $name := printf "%s%s" $indicator.alert .suffix }}
- alert: {{ $name }}
  expr: >-
    {{- range $index, $pair := .windows }}
    {{- if $index }}
    or
    {{- end }}
    (service:fairlead_slo_bad_requests:ratio_rate{{ .long }}{slo="{{ $indicator.slo }}"} > {{ .factor }} * {{ $budget }}
    and service:fairlead_slo_bad_requests:ratio_rate{{ .short }}{slo="{{ $indicator.slo }}"} > {{ .factor }} * {{ $budget }}
    and 60 * sum_over_time(service:fairlead_slo_bad_requests:rate5m{slo="{{ $indicator.slo }}"}[{{ .long }}]) > {{ $made.fewest }})
    {{- end }}
  for: {{ .for }}
  labels: {severity: {{ .severity }}}
  annotations:
    summary: {{ printf "%s: {{ $value | humanizePercentage }} %s. %s" $indicator.where $indicator.what .meaning | quote }}
    runbook_url: "{{ $runbooks }}#{{ lower $name }}"
{{- end }}
{{- end }}
{{- end }}
